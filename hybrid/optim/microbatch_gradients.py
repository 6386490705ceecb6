"""Gradients of ZeRO stage 2: this rank's fp32 shard, reduced every microbatch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from hybrid.optim.gradients import IN_FLIGHT, GradientBuckets
from hybrid.optim.layout import Bucket, BucketLayout, Piece
from hybrid.optim.reduction import start_reduction


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
        self._free = [torch.empty(largest, dtype=wire, device=device) for _ in range(IN_FLIGHT)]
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

    def _target(self, index: int) -> torch.Tensor | None:
        bucket = self._bucket_of[index]
        # A bucket further ahead would hold a buffer that an earlier one needs to make room: its gradients stay in the
        # parameters until its turn.
        if bucket.index > self._next + 1:
            return None
        item = self._place_of[index]
        return self._buffer(bucket)[item.start : item.stop].view(self._params[index].shape)

    def _is_first(self, index: int) -> bool:
        return True

    def _mark(self, index: int) -> None:
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
                self._receive(item.index)
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
