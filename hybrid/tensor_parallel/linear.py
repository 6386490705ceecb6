"""Linear layers cut over the tensor-parallel ranks, with their communication hidden behind their GEMMs.

Y = X A^T with A cut by rows (column-parallel, as Megatron-LM counts A^T) or by columns (row-parallel); Shoeybi et al.
2019, section 3, and with sequence parallelism Korthikanti et al. 2022, section 4.2.2. On CUDA the order "collective
first, then the GEMM that hides it" reaches the device as launched when CUDA_DEVICE_MAX_CONNECTIONS=1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from hybrid.config.parallel import Shard
from hybrid.tensor_parallel.collectives import (
    all_gather,
    all_reduce,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.params import GradientSink, ParamSpec, Segment, gradient_sink, replicated, set_spec

Grads = tuple[Tensor | None, Tensor | None, Tensor | None, None]


def _rows(x: Tensor) -> Tensor:
    """[s, b, n] as the matrix [s b, n], which may come as one; a view unless the incoming gradient is strided."""
    return x.flatten(0, -2)


def weight_gradient(grad_output: Tensor, inputs: Tensor, sink: GradientSink | None = None) -> Tensor | None:
    """dA = dY^T X over all tokens, in the weight's dtype; None where the weight's sink has taken it."""
    left, right = _rows(grad_output).t(), _rows(inputs)
    return None if sink is not None and sink(left, right) else left @ right


class _ColumnParallel(Function):
    """Y_r = X A_r^T + b_r.

    Forward: nothing, or under sequence parallelism an all-gather of X. Only the shard of X is saved.
    Backward: dX = sum over ranks of dY_r A_r, dA_r = dY_r^T X, db_r = sum over tokens of dY_r.
    The sum is an all-reduce, or a reduce-scatter under sequence parallelism, and runs behind the GEMM of dA_r; the
    all-gather of X that dA_r needs again runs behind the GEMM of dX.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
        ctx.tp, ctx.sink = tp, gradient_sink(weight)
        # A frozen weight needs no input, so that none is kept.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        full = all_gather(x, tp.group) if tp.sequence_sharded else x
        return F.linear(full, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grads:
        tp: TensorParallel = ctx.tp
        x, weight = ctx.saved_tensors
        need_input, need_weight, need_bias, _ = ctx.needs_input_grad
        gathered = start_all_gather(x, tp.group if tp.sequence_sharded else None) if need_weight else None
        grad = grad.contiguous()
        partial = grad @ weight if need_input else None
        # Waited for before the next launch: two collectives in flight would share the bandwidth and delay this one.
        full_x = gathered() if gathered is not None else None
        start = start_reduce_scatter if tp.sequence_sharded else start_all_reduce
        reduction = start(partial, tp.group) if partial is not None else None
        grad_weight = weight_gradient(grad, full_x, ctx.sink) if full_x is not None else None
        grad_bias = _rows(grad).sum(0) if need_bias else None
        return reduction() if reduction is not None else None, grad_weight, grad_bias, None


def _gather_and_multiply(x: Tensor, matrix: Tensor, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """All rows of x [s/t, b, k], and their product with a matrix [k, n]: [s, b, n].

    This rank's own rows are multiplied while the others' are on their way.
    """
    pending = start_all_gather(x, tp.group)
    product = x.new_empty(x.size(0) * tp.size, *x.shape[1:-1], matrix.size(1))
    start, stop = tp.rank * x.size(0), (tp.rank + 1) * x.size(0)
    torch.mm(_rows(x), matrix, out=_rows(product[start:stop]))
    full = pending()
    for part in (slice(0, start), slice(stop, None)):
        if full[part].numel():
            torch.mm(_rows(full[part]), matrix, out=_rows(product[part]))
    return full, product


class _RowParallel(Function):
    """Y = sum over ranks of X_r A_r^T, + b once.

    Forward: an all-reduce of the partial products, or a reduce-scatter under sequence parallelism.
    Backward: dX_r = dY A_r, dA_r = dY^T X_r. Nothing to communicate, or under sequence parallelism an all-gather of
    dY, which both products need; it runs behind the rows of dX_r that are at hand. db is the sum over the tokens at
    hand: under sequence parallelism those of the shard.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
        ctx.tp, ctx.sink = tp, gradient_sink(weight)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        partial = F.linear(x, weight)
        output = reduce_scatter(partial, tp.group) if tp.sequence_sharded else all_reduce(partial, tp.group)
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grads:
        tp: TensorParallel = ctx.tp
        x, weight = ctx.saved_tensors
        need_input, need_weight, need_bias, _ = ctx.needs_input_grad
        grad_bias = _rows(grad).sum(0) if need_bias else None
        grad_input = None
        if tp.sequence_sharded and need_input:
            grad, grad_input = _gather_and_multiply(grad, weight, tp)
        elif need_input:
            grad_input = grad @ weight
        elif tp.sequence_sharded and need_weight:
            grad = all_gather(grad, tp.group)
        grad_weight = weight_gradient(grad, x, ctx.sink) if need_weight else None
        return grad_input, grad_weight, grad_bias, None


def column_parallel(x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
    """[s, b, n] (or [s/t, b, n]) times the transpose of this rank's rows [m/t, n]: [s, b, m/t]."""
    result: Tensor = _ColumnParallel.apply(x, weight, bias, tp)
    return result


def row_parallel(x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
    """[s, b, n/t] times the transpose of this rank's columns [m, n/t], summed: [s, b, m] (or [s/t, b, m])."""
    result: Tensor = _RowParallel.apply(x, weight, bias, tp)
    return result


class ColumnParallelLinear(nn.Module):
    """One or more projections of the same input, fused in one weight, their output features cut over the ranks.

    `outputs` gives, for each projection, its Hugging Face module name and the rows of it that this rank holds; the
    rows of the weight are those shards one after the other. Forward: [s, b, in] (or [s/t, b, in]) to [s, b, rows].
    """

    def __init__(
        self,
        in_features: int,
        outputs: Sequence[tuple[str, Shard]],
        *,
        bias: bool,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.tp = tp
        weights, biases, offset = [], [], 0
        for name, shard in outputs:
            # Rows that several ranks hold feed another part of the computation on each of them.
            partial = shard.replicas > 1
            weights.append(Segment(f"{name}.weight", (shard.size, in_features), 0, shard, offset, partial))
            biases.append(Segment(f"{name}.bias", (shard.size,), 0, shard, offset, partial))
            offset += shard.length
        self.weight = nn.Parameter(torch.empty(offset, in_features, dtype=dtype, device=device))
        set_spec(self.weight, ParamSpec(segments=tuple(weights)))
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(offset, dtype=dtype, device=device))
            set_spec(self.bias, ParamSpec(segments=tuple(biases), decay=False))

    def forward(self, x: Tensor) -> Tensor:
        return column_parallel(x, self.weight, self.bias, self.tp)


class RowParallelLinear(nn.Module):
    """A projection whose input features are cut over the ranks: `shard` says which of them this rank holds.

    Forward: [s, b, shard.length] to [s, b, out] (or [s/t, b, out]). The bias is held whole and added after the sum.
    """

    def __init__(
        self,
        shard: Shard,
        out_features: int,
        *,
        name: str,
        bias: bool,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(out_features, shard.length, dtype=dtype, device=device))
        segment = Segment(f"{name}.weight", (out_features, shard.size), 1, shard)
        set_spec(self.weight, ParamSpec(segments=(segment,)))
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device))
            segment = replicated(f"{name}.bias", (out_features,), tp.rank, tp.size)
            spec = ParamSpec(segments=(segment,), decay=False, sequence_partial=tp.sequence_sharded)
            set_spec(self.bias, spec)

    def forward(self, x: Tensor) -> Tensor:
        return row_parallel(x, self.weight, self.bias, self.tp)
