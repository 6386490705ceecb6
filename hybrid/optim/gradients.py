"""Gradients into flat buckets, reduced over the data-parallel ranks while backward goes on.

Two policies share the bookkeeping. `StepGradients` (ZeRO stages 0 and 1) keeps a full fp32 buffer and communicates once
a step: 4N bytes of memory and 4N bytes into the reduce-scatter, whatever the number of microbatches.
`MicrobatchGradients` (stage 2) keeps only this rank's fp32 shard and reduce-scatters every microbatch: 4N/d bytes of
memory plus two buckets. Both accumulate in fp32 whatever the model's dtype (Rajbhandari et al. 2020; Megatron-LM's
distributed optimizer).
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from hybrid.collectives import reduce_scatter_single
from hybrid.grid import Group
from hybrid.optim.layout import Bucket, BucketLayout, Piece

_POOL_SIZE = 2
"""Bucket buffers alive under stage 2: one fills while the other is on the wire."""

Reduced = Callable[[], torch.Tensor]


def _reduces_in_place(buffer: torch.Tensor, wire: torch.dtype) -> bool:
    """Whether the sum comes about in the buffer itself, without copies that travel."""
    # gloo's reduce-scatter moves the bytes of an all-reduce and takes twice the time of its all-to-all.
    return wire == torch.float32 and not buffer.is_cpu


def start_reduction(
    buffer: torch.Tensor, shard: tuple[int, int], group: dist.ProcessGroup, wire: torch.dtype
) -> Reduced:
    """Begin to sum `buffer` over the group; the returned call waits and gives the fp32 sum of `buffer[start:stop]`.

    Whatever the wire dtype, the addition is in fp32. Where a reduce-scatter cannot do that the pieces travel by
    all-to-all, which moves the same bytes, and are summed where they arrive.
    """
    start, stop = shard
    if _reduces_in_place(buffer, wire):
        mine = buffer[start:stop]
        scattered = reduce_scatter_single(mine, buffer, group=group, async_op=True)

        def in_place() -> torch.Tensor:
            scattered.wait()
            return mine

        return in_place
    sent = buffer.to(wire)
    received = torch.empty_like(sent)
    exchanged = dist.all_to_all_single(received, sent, group=group, async_op=True)
    assert exchanged is not None

    def summed() -> torch.Tensor:
        exchanged.wait()
        return received.view(-1, stop - start).sum(dim=0, dtype=torch.float32)

    return summed


class GradientBuckets(ABC):
    """Collects each parameter's gradient as autograd produces it, and reduces the buckets in one fixed order.

    Bucket k is never launched before bucket k - 1, and what a backward left out counts as zero: every rank issues the
    same collectives in the same order whatever the order in which its hooks fire.
    """

    def __init__(self, params: Sequence[nn.Parameter], layout: BucketLayout, group: Group, shard: int) -> None:
        self._params = params
        self._layout = layout
        self._group = group
        self._shard = shard
        self._bucket_of = {item.index: bucket for bucket in layout.buckets for item in bucket.placements}
        self._place_of = {item.index: item for bucket in layout.buckets for item in bucket.placements}
        self._launching = False
        self._next = self._stop = 0
        self._missing: list[int] = []
        self._in_flight: deque[Callable[[], None]] = deque()
        self._norms: list[torch.Tensor] = []
        # The garbage collector does not see what a tensor's hook holds: a hook that held this would keep it for ever.
        this = weakref.ref(self)
        for index, param in enumerate(params):
            param.register_post_accumulate_grad_hook(partial(_collect, this, index))

    def receive(self, index: int) -> None:
        """Take the gradient that a backward left in a parameter, and launch the buckets it completes."""
        self._receive(index)
        if self._launching:
            self._missing[self._bucket_of[index].index] -= 1
            self._launch_ready()

    def begin_microbatch(self, last: bool, buckets: range | None = None) -> None:
        """Called before a microbatch's backward through the parameters of `buckets`, by default all; `last` marks the
        last one of the step that goes through them."""
        self._launching = self._communicates(last)
        buckets = range(len(self._layout.buckets)) if buckets is None else buckets
        self._next, self._stop = buckets.start, buckets.stop
        self._missing = [len(bucket.placements) for bucket in self._layout.buckets]

    def end_microbatch(self) -> None:
        """Called after a microbatch's backward: launches what it left incomplete."""
        if self._launching:
            self._missing = [0] * len(self._missing)
            self._launch_ready()
            self._launching = False

    def _launch_ready(self) -> None:
        buckets = self._layout.buckets
        while self._next < self._stop and self._missing[self._next] == 0:
            bucket = buckets[self._next]
            gradients = self._complete(bucket)
            # The sum over ranks does not tell whose part was not finite.
            self._norms.extend(torch._foreach_norm([gradients[i.start : i.stop] for i in bucket.placements]))
            self._reduce(bucket, gradients)
            self._next += 1

    def made_finite(self) -> bool:
        """Whether what this rank's own backwards put into this step's sums was finite; synchronises the device."""
        return not self._norms or bool(torch.isfinite(torch.stack(self._norms)).all())

    @abstractmethod
    def _communicates(self, last: bool) -> bool:
        """Whether this microbatch's backward launches reductions."""

    @abstractmethod
    def _receive(self, index: int) -> None:
        """Take the gradient autograd left in the parameter."""

    @abstractmethod
    def _complete(self, bucket: Bucket) -> torch.Tensor:
        """The flat gradients of a bucket whose turn it is, zero where no backward made one."""

    @abstractmethod
    def _reduce(self, bucket: Bucket, gradients: torch.Tensor) -> None:
        """Begin to sum a bucket over the data-parallel ranks."""

    def _finish_oldest(self) -> None:
        self._in_flight.popleft()()

    def finish(self) -> None:
        """Wait until `view` holds this step's sums over microbatches and data-parallel ranks."""
        while self._in_flight:
            self._finish_oldest()

    @abstractmethod
    def view(self, piece: Piece) -> torch.Tensor:
        """The reduced fp32 gradient of a piece of this rank's shard, flat; the same storage in every step."""

    def reset(self) -> None:
        """Forget the step's gradients."""
        self._norms.clear()

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the fp32 gradients held, padding included."""

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of the buffers the gradients pass through on their way there."""
        return 0


def _collect(buckets: weakref.ref[GradientBuckets], index: int, _: torch.Tensor) -> None:
    alive = buckets()
    if alive is not None:
        alive.receive(index)


class StepGradients(GradientBuckets):
    """One full fp32 buffer, reduced once a step from the last microbatch's backward.

    With `all_reduce` every rank gets the whole sum, always in fp32 (stage 0), else only its shard (stage 1).
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        layout: BucketLayout,
        group: Group,
        shard: int,
        *,
        wire: torch.dtype = torch.float32,
        all_reduce: bool = False,
    ) -> None:
        super().__init__(params, layout, group, shard)
        self._wire = wire
        self._all_reduce = all_reduce
        self._touched = [False] * len(params)
        device = params[0].device if params else None
        self._buffers = [torch.zeros(b.numel, dtype=torch.float32, device=device) for b in layout.buckets]
        self._views: list[torch.Tensor] = []
        for index, param in enumerate(params):
            item = self._place_of[index]
            buffer = self._buffers[self._bucket_of[index].index]
            self._views.append(buffer[item.start : item.stop].view(param.shape))

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def view(self, piece: Piece) -> torch.Tensor:
        return self._buffers[piece.bucket][piece.bucket_start : piece.bucket_start + piece.numel]

    def _communicates(self, last: bool) -> bool:
        return last

    def _receive(self, index: int) -> None:
        param, view = self._params[index], self._views[index]
        assert param.grad is not None
        if self._touched[index]:
            view.add_(param.grad)
        else:
            view.copy_(param.grad)
            self._touched[index] = True
        param.grad = None

    def _complete(self, bucket: Bucket) -> torch.Tensor:
        for item in bucket.placements:
            if not self._touched[item.index]:
                self._views[item.index].zero_()
        return self._buffers[bucket.index]

    def _reduce(self, bucket: Bucket, gradients: torch.Tensor) -> None:
        if self._group is None:
            return
        if self._all_reduce:
            work = dist.all_reduce(gradients, group=self._group, async_op=True)
            assert work is not None
            self._in_flight.append(work.wait)
            return
        in_place = _reduces_in_place(gradients, self._wire)
        if not in_place and len(self._in_flight) == _POOL_SIZE:
            self._finish_oldest()  # bounds the memory of the copies that travel
        start, stop = bucket.shard_range(self._shard)
        reduced = start_reduction(gradients, (start, stop), self._group, self._wire)

        def finish() -> None:
            result = reduced()
            if not in_place:
                gradients[start:stop].copy_(result)

        self._in_flight.append(finish)

    def reset(self) -> None:
        super().reset()
        self._touched = [False] * len(self._params)


class MicrobatchGradients(GradientBuckets):
    """This rank's fp32 shard only; every microbatch's gradients pass through two bucket buffers."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        layout: BucketLayout,
        group: dist.ProcessGroup,
        shard: int,
        *,
        wire: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(params, layout, group, shard)
        self._wire = wire
        self._reduced: set[int] = set()
        device = params[0].device if params else None
        largest = max((bucket.numel for bucket in layout.buckets), default=0)
        self._free = [torch.empty(largest, dtype=wire, device=device) for _ in range(_POOL_SIZE)]
        self._filling: dict[int, torch.Tensor] = {}
        self._received: set[int] = set()
        self._shards = [torch.zeros(b.shard_numel, dtype=torch.float32, device=device) for b in layout.buckets]

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self._shards)

    @property
    def buffer_nbytes(self) -> int:
        return len(self._free) * self._free[0].nbytes if self._free else 0

    def view(self, piece: Piece) -> torch.Tensor:
        start = piece.bucket_start - self._layout.buckets[piece.bucket].shard_range(self._shard)[0]
        return self._shards[piece.bucket][start : start + piece.numel]

    def _communicates(self, last: bool) -> bool:
        return True

    def begin_microbatch(self, last: bool, buckets: range | None = None) -> None:
        super().begin_microbatch(last, buckets)
        self._received.clear()

    def _receive(self, index: int) -> None:
        bucket = self._bucket_of[index]
        # A bucket further ahead would hold a buffer that an earlier one needs to make room: its gradients stay in the
        # parameters until its turn.
        if bucket.index <= self._next + 1:
            self._store(index, self._buffer(bucket))

    def _store(self, index: int, buffer: torch.Tensor) -> None:
        item, param = self._place_of[index], self._params[index]
        assert param.grad is not None
        buffer[item.start : item.stop].view(param.shape).copy_(param.grad)
        param.grad = None
        self._received.add(index)

    def _buffer(self, bucket: Bucket) -> torch.Tensor:
        buffer = self._filling.get(bucket.index)
        if buffer is None:
            if not self._free:
                self._finish_oldest()
            buffer = self._filling[bucket.index] = self._free.pop()
        return buffer

    def _complete(self, bucket: Bucket) -> torch.Tensor:
        buffer = self._buffer(bucket)
        for item in bucket.placements:
            if item.index in self._received:
                continue
            if self._params[item.index].grad is not None:
                self._store(item.index, buffer)
            else:
                buffer[item.start : item.stop].zero_()
        return buffer[: bucket.numel]

    def _reduce(self, bucket: Bucket, gradients: torch.Tensor) -> None:
        buffer = self._filling.pop(bucket.index)
        assert self._group is not None
        reduced = start_reduction(gradients, bucket.shard_range(self._shard), self._group, self._wire)
        first, shard = bucket.index not in self._reduced, self._shards[bucket.index]
        self._reduced.add(bucket.index)

        def finish() -> None:
            if first:
                shard.copy_(reduced())
            else:
                shard.add_(reduced())
            self._free.append(buffer)

        self._in_flight.append(finish)

    def reset(self) -> None:
        super().reset()
        self._reduced.clear()
