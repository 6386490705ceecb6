"""The gated MLP, its intermediate features cut over the tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from hybrid.config.model import LlamaConfig
from hybrid.config.parallel import even_shard
from hybrid.model.formulas import Formulas
from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from hybrid.tensor_parallel.random import DiscardedOutput


def _forward(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.empty_like(gate_up)
    grad_gate, grad_up = out.chunk(2, dim=-1)
    torch.mul(grad, F.silu(gate), out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
    return out


def _joined_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """As `_backward`, which torch.compile cannot follow into parts of a tensor; to a fused kernel, joining is free."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.cat((torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)), dim=-1)


SWIGLU = Formulas(_forward, _backward)
FUSIBLE_SWIGLU = Formulas(_forward, _joined_backward)


class _SwiGLU(Function):
    """silu(gate) up (Shazeer 2020, arXiv:2002.05202). Keeps its input only; backward repeats silu(gate)."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, formulas: Formulas) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.formulas = formulas
        result: Tensor = formulas.forward(gate_up)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.formulas.backward(grad, *ctx.saved_tensors), None


def swiglu(gate_up: Tensor, formulas: Formulas = SWIGLU) -> Tensor:
    """[..., 2 f], gate then up, to [..., f]."""
    result: Tensor = _SwiGLU.apply(gate_up, formulas)
    return result


class MLP(nn.Module):
    """gate and up as one column-parallel projection, SwiGLU, and a row-parallel projection.

    With `recompute_product` the input of the second projection is not kept but computed again in backward. `operator`
    computes what `swiglu` does.
    """

    def __init__(
        self,
        config: LlamaConfig,
        layer: int,
        *,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device | str,
        recompute_product: bool = False,
        operator: Callable[[Tensor], Tensor] = swiglu,
    ) -> None:
        super().__init__()
        self.recompute_product = recompute_product
        self._operator = operator
        name = f"model.layers.{layer}.mlp"
        shard = even_shard(config.intermediate_size, tp.size, tp.rank)
        self.gate_up_proj = ColumnParallelLinear(
            config.hidden_size,
            [(f"{name}.gate_proj", shard), (f"{name}.up_proj", shard)],
            bias=config.mlp_bias,
            tp=tp,
            dtype=dtype,
            device=device,
        )
        self.down_proj = RowParallelLinear(
            shard,
            config.hidden_size,
            name=f"{name}.down_proj",
            bias=config.mlp_bias,
            tp=tp,
            dtype=dtype,
            device=device,
        )

    def forward(self, hidden: Tensor, release: Callable[[Tensor], None] | None = None) -> Tensor:
        """[..., h] to the same, of all tokens or of this rank's under sequence parallelism.

        `release` is called with the projection's output once `hidden` has been used.
        """
        gate_up = self.gate_up_proj(hidden)
        if release is not None:
            release(gate_up)
        discarded = DiscardedOutput()
        output: Tensor = self.down_proj(discarded.run(self._operator, gate_up))
        if self.recompute_product:
            discarded.discard_after(output)
        return output
