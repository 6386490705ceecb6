"""Gradients of ZeRO stages 0 and 1: a full fp32 buffer, reduced once a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from hybrid.grid import Group
from hybrid.optim.gradients import IN_FLIGHT, GradientBuckets
from hybrid.optim.layout import Bucket, BucketLayout, Piece
from hybrid.optim.reduction import reduces_in_place, start_reduction


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

    def _target(self, index: int) -> torch.Tensor:
        return self._views[index]

    def _is_first(self, index: int) -> bool:
        return not self._touched[index]

    def _mark(self, index: int) -> None:
        self._touched[index] = True

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
        in_place = reduces_in_place(gradients, self._wire)
        if not in_place and len(self._in_flight) == IN_FLIGHT:
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
