"""Grouped-query self-attention, its heads cut over the tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid.config.model import LlamaConfig
from hybrid.config.parallel import Shard, even_shard, kv_head_shard
from hybrid.model.cache import KVCache
from hybrid.model.formulas import Formulas
from hybrid.model.packing import Documents, Visible
from hybrid.model.rope import ROTATION, Rope, split_rotary
from hybrid.model.varlen import has_kernel, kernel_attention
from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear


def _rows(heads: Shard, head_dim: int) -> Shard:
    """The rows of a projection that belong to `heads`."""
    size, start, stop = (n * head_dim for n in (heads.size, heads.start, heads.stop))
    return Shard(size, start, stop, heads.replicas, heads.owner)


def _grouped_kernel(q: Tensor, mask: Tensor | None) -> bool:
    """Whether torch has a blockwise kernel that shares key/value heads here; elsewhere it would hold all scores."""
    return q.device.type == "cpu" or (q.dtype in (torch.bfloat16, torch.float16) and mask is None)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, dropout: float = 0.0, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v over the positions up to one's own (Vaswani et al. 2017).

    Args:
        q: [s, b, heads, d]; k and v [s, b, kv_heads, d], each shared by heads / kv_heads query heads (Ainslie et al.
            2023), in order.
        mask: [b, 1, s, s] bool, true where a position is seen; it replaces the causal rule, so it has to imply it.

    Returns:
        [s, b, heads d].
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    grouped = q.size(1) != k.size(1)
    if grouped and not _grouped_kernel(q, mask):
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
        grouped = False
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=grouped
    )
    return out.permute(2, 0, 1, 3).flatten(2)


def document_attention(q: Tensor, k: Tensor, v: Tensor, documents: Documents, *, dropout: float = 0.0) -> Tensor:
    """`causal_attention` within each document of the rows; neither work nor memory grows with a row's square.

    One kernel where there is one for documents of several lengths, else one call for each document, which holds the
    output twice: as the calls saved it, and whole.
    """
    if has_kernel(q, dropout):
        return kernel_attention(q, k, v, documents)
    rows = []
    # Cut with unbind and split, whose backward writes one gradient; that of slices would add up one for each.
    for lengths, *row in zip(documents.lengths, q.unbind(1), k.unbind(1), v.unbind(1), strict=True):
        parts = zip(*(x.unsqueeze(1).split(lengths) for x in row), strict=True)
        rows.append(torch.cat([causal_attention(*part, dropout=dropout) for part in parts]))
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)


class Attention(nn.Module):
    """q, k and v as one column-parallel projection, attention over this rank's heads, and a row-parallel projection.

    Where there are more ranks than key/value heads, neighbours hold the same one, and its gradient is the sum over
    those ranks (the `replicas` of its segments). `rotation` computes what `ROTATION` does.
    """

    def __init__(
        self,
        config: LlamaConfig,
        layer: int,
        *,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device | str,
        rotation: Formulas = ROTATION,
    ) -> None:
        super().__init__()
        self._rotation = rotation
        assert tp.rng is not None or config.attention_dropout == 0, "attention dropout draws from the tracker"
        q_heads = even_shard(config.num_attention_heads, tp.size, tp.rank)
        kv_heads = kv_head_shard(config.num_key_value_heads, tp.size, tp.rank)
        self.heads, self.kv_heads = q_heads.length, kv_heads.length
        self.dropout, self.rng = config.attention_dropout, tp.rng
        self.cache: KVCache | None = None
        """Set while decoding: the queries then also see the tokens of earlier calls, as `visible` says."""
        name, d = f"model.layers.{layer}.self_attn", config.head_dim
        outputs = [
            (f"{name}.q_proj", _rows(q_heads, d)),
            (f"{name}.k_proj", _rows(kv_heads, d)),
            (f"{name}.v_proj", _rows(kv_heads, d)),
        ]
        self.qkv_proj = ColumnParallelLinear(
            config.hidden_size, outputs, bias=config.attention_bias, tp=tp, dtype=dtype, device=device
        )
        self.o_proj = RowParallelLinear(
            _rows(q_heads, d),
            config.hidden_size,
            name=f"{name}.o_proj",
            bias=config.attention_bias,
            tp=tp,
            dtype=dtype,
            device=device,
        )

    def forward(
        self,
        hidden: Tensor,
        rope: Rope,
        visible: Visible | None = None,
        release: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """[s b, h] (or [s b / t, h]) to the same; `visible` replaces the causal rule.

        `release` is called with the projection's output once `hidden` has been used.
        """
        qkv = self.qkv_proj(hidden)
        if release is not None:
            release(qkv)
        q, k, v = split_rotary(qkv, rope, self.heads, self.kv_heads, self._rotation)
        if self.cache is not None:
            k, v = self.cache.append(k, v)
        dropout = self.dropout if self.training else 0.0
        with self.rng.fork() if dropout and self.rng is not None else nullcontext():
            if isinstance(visible, Documents):
                context = document_attention(q, k, v, visible, dropout=dropout)
            else:
                context = causal_attention(q, k, v, dropout=dropout, mask=visible)
        # With several samples its memory is in another order: as rows it would be a copy, which would be kept too.
        output: Tensor = self.o_proj(context)
        return output.flatten(0, 1)
