"""One decoder layer: attention and MLP, each behind a norm and added to the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from hybrid.config.model import LlamaConfig
from hybrid.model.attention import Attention
from hybrid.model.kernels import TORCH, Kernels
from hybrid.model.mlp import MLP
from hybrid.model.norm import RMSNorm
from hybrid.model.packing import Visible
from hybrid.model.rope import Rope
from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.random import DiscardedOutput, checkpoint

Recompute = Literal["none", "selective", "full"]
"""What is computed again in backward rather than kept.

none: nothing. selective: the outputs of the norms and the SwiGLU product, whose recomputation costs no GEMM and no
collective. full: everything but the layer's input (Chen et al. 2016).
"""


class TransformerBlock(nn.Module):
    """Decoder layer `layer` of the model: hidden states [s, b, h] (or [s/t, b, h]) to the same."""

    def __init__(
        self,
        config: LlamaConfig,
        layer: int,
        *,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device | str,
        recompute: Recompute = "none",
        kernels: Kernels = TORCH,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        # Only dropout makes the layer random; without it recomputation has no stream to put back.
        self.rng = tp.rng if config.attention_dropout else None
        name = f"model.layers.{layer}"

        def norm(which: str) -> RMSNorm:
            size, eps = config.hidden_size, config.rms_norm_eps
            operator = kernels.rms_norm
            return RMSNorm(size, eps, name=f"{name}.{which}", tp=tp, dtype=dtype, device=device, operator=operator)

        self.input_layernorm = norm("input_layernorm")
        self.self_attn = Attention(config, layer, tp=tp, dtype=dtype, device=device, rotation=kernels.rotation)
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.mlp = MLP(
            config,
            layer,
            tp=tp,
            dtype=dtype,
            device=device,
            recompute_product=recompute == "selective",
            operator=kernels.swiglu,
        )

    def forward(self, hidden: Tensor, rope: Rope, visible: Visible | None = None) -> Tensor:
        """`visible` replaces the causal rule."""
        # torch takes every product of three dims apart and puts it together again: once for the whole layer is enough.
        rows = hidden.flatten(0, 1)
        if self.recompute == "full" and torch.is_grad_enabled():
            rng = self.rng if self.training else None
            output: Tensor = checkpoint(self._layer, rows, rope, visible, rng=rng)
        else:
            output = self._layer(rows, rope, visible)
        return output.view_as(hidden)

    def _layer(self, hidden: Tensor, rope: Rope, visible: Visible | None) -> Tensor:
        """Hidden states as rows, [s b, h] (or [s b / t, h]), to the same."""
        normed, release = self._normalise(self.input_layernorm, hidden)
        hidden = hidden + self.self_attn(normed, rope, visible, release)
        normed, release = self._normalise(self.post_attention_layernorm, hidden)
        output: Tensor = hidden + self.mlp(normed, release)
        return output

    def _normalise(self, norm: RMSNorm, hidden: Tensor) -> tuple[Tensor, Callable[[Tensor], None] | None]:
        """The norm's output, and what to call when it has been used."""
        if self.recompute != "selective":
            return norm(hidden), None
        discarded = DiscardedOutput()
        return discarded.run(norm, hidden), discarded.discard_after
