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
from torch import nn

from hybrid.grid import Group
from hybrid.optim.layout import Bucket, BucketLayout, Piece
from hybrid.optim.products import sum_product, sums_products
from hybrid.tensor_parallel.params import set_gradient_sink

IN_FLIGHT = 2
"""Buffers of stage 2, one of which fills while the other travels; elsewhere the copies that travel at once."""


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
            set_gradient_sink(param, partial(_collect_product, this, index))

    def receive(self, index: int) -> None:
        """Take the gradient that a backward left in a parameter, and launch the buckets it completes.

        Nothing is left of one that went to `receive_product`.
        """
        if self._params[index].grad is not None:
            self._receive(index)
            self._arrived(index)

    def receive_product(self, index: int, left: torch.Tensor, right: torch.Tensor) -> bool:
        """As `receive`, of a gradient left @ right that nobody has computed yet; false if it has to be."""
        view = self._target(index)
        if view is None or not sums_products(view, left):
            return False
        sum_product(view, left, right, first=self._is_first(index))
        self._mark(index)
        self._arrived(index)
        return True

    def _arrived(self, index: int) -> None:
        """Launch the buckets that a gradient completes."""
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
    def _target(self, index: int) -> torch.Tensor | None:
        """Where a parameter's gradient is summed, in its shape; None while there is no room for it."""

    @abstractmethod
    def _is_first(self, index: int) -> bool:
        """Whether what `_target` holds is of the past, to be written over."""

    @abstractmethod
    def _mark(self, index: int) -> None:
        """Note that `_target` holds a gradient."""

    def _receive(self, index: int) -> None:
        """Take the gradient autograd left in the parameter, or leave it there until there is room."""
        param, view = self._params[index], self._target(index)
        assert param.grad is not None
        if view is None:
            return
        if self._is_first(index):
            view.copy_(param.grad)
        else:
            view.add_(param.grad)
        self._mark(index)
        param.grad = None

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


def _collect_product(
    buckets: weakref.ref[GradientBuckets], index: int, left: torch.Tensor, right: torch.Tensor
) -> bool:
    alive = buckets()
    return alive is not None and alive.receive_product(index, left, right)


def _collect(buckets: weakref.ref[GradientBuckets], index: int, _: torch.Tensor) -> None:
    alive = buckets()
    if alive is not None:
        alive.receive(index)
