"""Conjugate pairs of communication operators around a tensor-parallel region, each with its own backward.

`f` and `g` are those of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3); the sequence-parallel pair
`g` and `g-bar` is that of Korthikanti et al. 2022 (arXiv:2205.05198, section 4.2.2). All act along dim 0, which is the
sequence, so that nothing is transposed before or after. With no group every one of them is the identity.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from hybrid.tensor_parallel.collectives import Group, all_gather, all_reduce, rank_slice, reduce_scatter


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.clone(), ctx.group), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x.clone(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        # A copy, so that the shard does not keep the whole sequence alive.
        return rank_slice(x, group).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.group), None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, ctx.group), None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.group), None


def _apply(function: type[Function], x: Tensor, group: Group) -> Tensor:
    if group is None:
        return x
    result: Tensor = function.apply(x, group)
    return result


def copy_to_tensor_parallel(x: Tensor, group: Group) -> Tensor:
    """Megatron's `f`: y = x on every rank. Backward: dx = sum over ranks of dy, an all-reduce."""
    return _apply(_Copy, x, group)


def reduce_from_tensor_parallel(x: Tensor, group: Group) -> Tensor:
    """Megatron's `g`: y = sum over ranks of x, an all-reduce. Backward: dx = dy on every rank."""
    return _apply(_Reduce, x, group)


def scatter_to_sequence_parallel(x: Tensor, group: Group) -> Tensor:
    """Rank r takes part r of an x that all ranks hold: [s, ...] to [s/t, ...]. Backward: an all-gather of dy."""
    return _apply(_Scatter, x, group)


def gather_from_sequence_parallel(x: Tensor, group: Group) -> Tensor:
    """Sequence-parallel `g`: [s/t, ...] to [s, ...], an all-gather.

    Backward: dx = this rank's part of the sum over ranks of dy, a reduce-scatter; for a y that feeds a
    tensor-parallel region, where each rank computes another part of the gradient.
    """
    return _apply(_Gather, x, group)


def reduce_scatter_to_sequence_parallel(x: Tensor, group: Group) -> Tensor:
    """Sequence-parallel `g-bar`: this rank's part of the sum over ranks of x, a reduce-scatter: [s, ...] to [s/t, ...].

    Backward: dx = all parts of dy, an all-gather.
    """
    return _apply(_ReduceScatter, x, group)
