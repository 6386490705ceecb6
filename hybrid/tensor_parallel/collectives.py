"""The four collectives of tensor parallelism, along dim 0, each of them able to run behind a GEMM.

What starts one returns a call that waits for it and gives the result; on CUDA the current stream waits, not the host.
Where gloo carries them, on a CPU, all-to-alls stand for them (hybrid/collectives.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.collectives import (
    Awaited,
    all_gather_single,
    by_exchange,
    exchange_gather,
    exchange_pair,
    exchange_reduce,
    reduce_scatter_single,
)

Group = dist.ProcessGroup | None
"""A process group, or None for one rank: then nothing is communicated and tensors pass through untouched."""


def _finish(work: Any, output: Tensor, source: Tensor) -> Tensor:
    """Wait; `source` has lived until then, as the transfer reads it."""
    work.wait()
    return output


def start_all_gather(x: Tensor, group: Group) -> Awaited:
    """Launch the concatenation along dim 0 of every rank's `x`, in rank order."""
    if group is None:
        return lambda: x
    x = x.contiguous()
    if by_exchange(x):
        return exchange_gather(x, group)
    output = x.new_empty(x.size(0) * group.size(), *x.shape[1:])
    return partial(_finish, all_gather_single(output, x, group=group, async_op=True), output, x)


def start_reduce_scatter(x: Tensor, group: Group) -> Awaited:
    """Launch the sum of every rank's `x`, of which this rank gets its equal part of dim 0."""
    if group is None:
        return lambda: x
    assert x.size(0) % group.size() == 0, "dim 0 is a multiple of the group's size"
    x = x.contiguous()
    if by_exchange(x):
        return exchange_reduce(x, group, x.dtype)
    output = x.new_empty(x.size(0) // group.size(), *x.shape[1:])
    return partial(_finish, reduce_scatter_single(output, x, group=group, async_op=True), output, x)


def start_all_reduce(x: Tensor, group: Group) -> Awaited:
    """Launch the sum of every rank's `x`; a contiguous `x` is overwritten."""
    if group is None:
        return lambda: x
    x = x.contiguous()
    if by_exchange(x) and group.size() == 2:
        other = exchange_pair(x, group)
        return lambda: x.add_(other())
    return partial(_finish, dist.all_reduce(x, group=group, async_op=True), x, x)


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Concatenation along dim 0 of every rank's `x`."""
    return start_all_gather(x, group)()


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """This rank's equal part along dim 0 of the sum of every rank's `x`."""
    return start_reduce_scatter(x, group)()


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum of every rank's `x`; a contiguous `x` is overwritten."""
    return start_all_reduce(x, group)()


def all_reduce_max(x: Tensor, group: Group) -> Tensor:
    """Elementwise maximum over the ranks, in place."""
    if group is None:
        return x
    if by_exchange(x) and group.size() == 2:
        return torch.maximum(x, exchange_pair(x, group)(), out=x)
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x


def rank_slice(x: Tensor, group: Group) -> Tensor:
    """This rank's equal part of dim 0 of a tensor that every rank holds; a view."""
    if group is None:
        return x
    assert x.size(0) % group.size() == 0, "dim 0 is a multiple of the group's size"
    return torch.chunk(x, group.size())[group.rank()]
