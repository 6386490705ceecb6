"""The token embedding, its rows cut over the tensor-parallel ranks, and the parameter the output head shares."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from hybrid.config.parallel import Shard, padded_vocab_size
from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.mappings import reduce_from_tensor_parallel, reduce_scatter_to_sequence_parallel
from hybrid.tensor_parallel.params import ParamSpec, Segment, set_spec


def vocab_shard(vocab_size: int, tp_size: int, rank: int) -> Shard:
    """The token ids whose rows `rank` holds; empty where its rows of the padded vocabulary are all padding."""
    rows = padded_vocab_size(vocab_size, tp_size) // tp_size
    return Shard(vocab_size, min(rank * rows, vocab_size), min((rank + 1) * rows, vocab_size))


def vocab_parallel_weight(
    vocab_size: int,
    hidden_size: int,
    *,
    name: str,
    tp: TensorParallel,
    dtype: torch.dtype,
    device: torch.device | str,
    tied: bool = False,
) -> nn.Parameter:
    """[padded vocabulary / t, hidden] rows of the embedding or the output head, whose module is called `name`."""
    rows = padded_vocab_size(vocab_size, tp.size) // tp.size
    weight = nn.Parameter(torch.empty(rows, hidden_size, dtype=dtype, device=device))
    shard = vocab_shard(vocab_size, tp.size, tp.rank)
    segment = Segment(f"{name}.weight", (vocab_size, hidden_size), 0, shard)
    set_spec(weight, ParamSpec(segments=(segment,), tied=tied))
    return weight


def _sum_by_row(grad: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """Gradient of `like[rows]`: the sum of `grad` over the tokens of each row.

    Tokens are sorted by row and summed segment by segment in fp32: one order of summation on any device, and no
    half-precision sum over the thousands of times a frequent token occurs.
    """
    rows, order = rows.sort(stable=True)
    starts = torch.ones_like(rows, dtype=torch.bool)
    torch.ne(rows[1:], rows[:-1], out=starts[1:])
    segment = starts.cumsum(0) - 1
    lengths = torch.zeros_like(rows).scatter_add_(0, segment, torch.ones_like(rows))
    sums = torch.segment_reduce(grad[order].float(), "sum", lengths=lengths, unsafe=True).to(like.dtype)
    # As many segments as tokens, so that no size depends on data: the empty ones add their zero to the first row.
    targets = torch.zeros_like(rows).scatter_(0, segment, rows)
    return torch.zeros_like(like).index_put_((targets,), sums, accumulate=True)


class _LocalRows(Function):
    """Rows of this rank's part of the table; zeros for ids it does not hold."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, start: int) -> Tensor:
        wanted = ids - start
        local = wanted.clamp(0, weight.size(0) - 1)
        outside = (local != wanted).unsqueeze(-1)
        ctx.save_for_backward(local, outside, weight)
        return weight[local].masked_fill_(outside, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        local, outside, weight = ctx.saved_tensors
        grad = grad.masked_fill(outside, 0)
        return _sum_by_row(grad.flatten(0, -2), local.flatten(), weight), None, None


class VocabParallelEmbedding(nn.Module):
    """Y = sum over ranks of E_r[ids]: token ids [b, s] to hidden states [s, b, h], or [s/t, b, h].

    Forward: an all-reduce (Megatron's `g`), or a reduce-scatter along the sequence under sequence parallelism.
    Backward: nothing, or an all-gather; then each rank sums the gradient of its own rows, in a fixed order.

    Ids are not checked here, which would wait for the device: one outside the padded vocabulary gives zeros on every
    rank, one in the padding gives its zero row. The data pipeline refuses both before training starts.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        name: str,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device | str,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.weight = vocab_parallel_weight(
            vocab_size, hidden_size, name=name, tp=tp, dtype=dtype, device=device, tied=tied
        )

    def forward(self, ids: Tensor) -> Tensor:
        # Transposed while they are ids: the rows come out sequence first without a copy of hidden states.
        rows: Tensor = _LocalRows.apply(self.weight, ids.t(), self.tp.rank * self.weight.size(0))
        if self.tp.sequence_sharded:
            return reduce_scatter_to_sequence_parallel(rows, self.tp.group)
        return reduce_from_tensor_parallel(rows, self.tp.group)
