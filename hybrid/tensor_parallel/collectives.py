"""The four collectives of tensor parallelism, along dim 0, each of them able to run behind a GEMM."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.collectives import all_gather_single, reduce_scatter_single

Group = dist.ProcessGroup | None
"""A process group, or None for one rank: then nothing is communicated and tensors pass through untouched."""


class Pending:
    """A collective in flight; it holds the input too, which has to live until the result is there."""

    def __init__(self, output: Tensor, work: Any = None, source: Tensor | None = None) -> None:
        self._output, self._work, self._source = output, work, source

    def wait(self) -> Tensor:
        """The result; on CUDA the current stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
            self._work = self._source = None
        return self._output


def start_all_gather(x: Tensor, group: Group) -> Pending:
    """Launch the concatenation along dim 0 of every rank's `x`, in rank order."""
    if group is None:
        return Pending(x)
    x = x.contiguous()
    output = x.new_empty(x.size(0) * group.size(), *x.shape[1:])
    return Pending(output, all_gather_single(output, x, group=group, async_op=True), x)


def start_reduce_scatter(x: Tensor, group: Group) -> Pending:
    """Launch the sum of every rank's `x`, of which this rank gets its equal part of dim 0."""
    if group is None:
        return Pending(x)
    assert x.size(0) % group.size() == 0, "dim 0 is a multiple of the group's size"
    x = x.contiguous()
    output = x.new_empty(x.size(0) // group.size(), *x.shape[1:])
    return Pending(output, reduce_scatter_single(output, x, group=group, async_op=True), x)


def start_all_reduce(x: Tensor, group: Group) -> Pending:
    """Launch the sum of every rank's `x`; a contiguous `x` is overwritten."""
    if group is None:
        return Pending(x)
    x = x.contiguous()
    return Pending(x, dist.all_reduce(x, group=group, async_op=True))


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Concatenation along dim 0 of every rank's `x`."""
    return start_all_gather(x, group).wait()


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """This rank's equal part along dim 0 of the sum of every rank's `x`."""
    return start_reduce_scatter(x, group).wait()


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum of every rank's `x`; a contiguous `x` is overwritten."""
    return start_all_reduce(x, group).wait()


def all_reduce_max(x: Tensor, group: Group) -> Tensor:
    """Elementwise maximum over the ranks, in place."""
    if group is not None:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x


def rank_slice(x: Tensor, group: Group) -> Tensor:
    """This rank's equal part of dim 0 of a tensor that every rank holds; a view."""
    if group is None:
        return x
    assert x.size(0) % group.size() == 0, "dim 0 is a multiple of the group's size"
    return torch.chunk(x, group.size())[group.rank()]
