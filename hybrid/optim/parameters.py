"""Parameters as views of flat buckets, whose shards are gathered asynchronously and waited for by bucket."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from hybrid.collectives import all_gather_single
from hybrid.grid import Group
from hybrid.optim.layout import BucketLayout, Piece


class ParameterBuckets:
    """Moves the parameters into the buckets of `layout`: each becomes a view, its old storage is freed.

    Args:
        params: the trainable parameters, in the order of the layout's items, all of one dtype.
        layout: where each lies.
        group: data-parallel group over whose ranks the shards are spread; None where nothing is sharded.
        shard: number of this rank's shard.
    """

    def __init__(self, params: Sequence[nn.Parameter], layout: BucketLayout, group: Group, shard: int) -> None:
        self.layout = layout
        self._group = group
        self._shard = shard
        self._buffers: list[torch.Tensor] = []
        self._pending: dict[int, dist.Work] = {}
        for bucket in layout.buckets:
            first = params[bucket.placements[0].index]
            buffer = torch.zeros(bucket.numel, dtype=first.dtype, device=first.device)
            for item in bucket.placements:
                param = params[item.index]
                view = buffer[item.start : item.stop].view(param.shape)
                view.copy_(param.detach())
                param.data = view
            self._buffers.append(buffer)

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def view(self, piece: Piece) -> torch.Tensor:
        """A piece of the parameters, flat, in the model's dtype."""
        return self._buffers[piece.bucket][piece.bucket_start : piece.bucket_start + piece.numel]

    def whole(self, pieces: Iterable[Piece], values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """fp32 values of the parameters, of which each rank gives its own pieces: by index, flat; a collective call."""
        found: list[torch.Tensor] = [torch.empty(0)] * sum(len(bucket.placements) for bucket in self.layout.buckets)
        parts = list(zip(pieces, values, strict=True))
        for bucket in self.layout.buckets:
            start, stop = bucket.shard_range(self._shard)
            shard = torch.zeros(stop - start, dtype=torch.float32, device=self._buffers[bucket.index].device)
            for piece, value in parts:
                if piece.bucket == bucket.index:
                    shard[piece.bucket_start - start :][: piece.numel] = value
            buffer = shard
            if self._group is not None:
                buffer = shard.new_empty(bucket.numel)
                all_gather_single(buffer, shard, group=self._group)
            for item in bucket.placements:
                found[item.index] = buffer[item.start : item.stop]
        return found

    def gather(self) -> None:
        """Launch the all-gather of every bucket, in the order in which the next forward needs them."""
        if self._group is None:
            return
        for bucket in reversed(self.layout.buckets):
            buffer = self._buffers[bucket.index]
            start, stop = bucket.shard_range(self._shard)
            work = all_gather_single(buffer, buffer[start:stop], group=self._group, async_op=True)
            self._pending[bucket.index] = work

    def wait(self, buckets: Iterable[int]) -> None:
        """Wait until these buckets hold the weights of the last step, and no longer."""
        for index in buckets:
            work = self._pending.pop(index, None)
            if work is not None:
                work.wait()

    def wait_all(self) -> None:
        """Wait for every bucket."""
        self.wait(list(self._pending))
