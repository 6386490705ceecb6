"""Where every parameter lies in the flat buckets, and which rank owns which elements: pure arithmetic.

A bucket is a contiguous buffer that holds whole parameters, each at an aligned offset, and is cut into `num_shards`
equal shards. The order of the items is the order in which their gradients become ready, so that the buckets fill one
after the other in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Elements: parameters and shards start at multiples of this (128 bytes in bf16, what GEMM and NCCL like)."""


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Placement:
    """Item `index` occupies `[start, start + numel)` of its bucket."""

    index: int
    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Bucket:
    """One contiguous buffer of `numel` elements (padding included), cut into `num_shards` equal shards."""

    index: int
    placements: tuple[Placement, ...]
    numel: int
    num_shards: int

    @property
    def shard_numel(self) -> int:
        return self.numel // self.num_shards

    def shard_range(self, shard: int) -> tuple[int, int]:
        """`[start, stop)` of a shard in the bucket."""
        return shard * self.shard_numel, (shard + 1) * self.shard_numel


@dataclass(frozen=True)
class Piece:
    """The part of one item that one shard owns: `[start, stop)` of the item, at `bucket_start` of the bucket."""

    index: int
    bucket: int
    start: int
    stop: int
    bucket_start: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class BucketLayout:
    """All buckets of a rank. Every element of every item lies in exactly one piece of exactly one shard."""

    buckets: tuple[Bucket, ...]
    num_shards: int

    @property
    def numel(self) -> int:
        """Elements of all buckets, padding included."""
        return sum(bucket.numel for bucket in self.buckets)

    def pieces(self, shard: int) -> list[Piece]:
        """What shard number `shard` of every bucket owns, in bucket order."""
        pieces = []
        for bucket in self.buckets:
            low, high = bucket.shard_range(shard)
            for item in bucket.placements:
                start, stop = max(low, item.start), min(high, item.stop)
                if start < stop:
                    pieces.append(Piece(item.index, bucket.index, start - item.start, stop - item.start, start))
        return pieces


def build_layout(
    sizes: Sequence[int],
    *,
    bucket_size: int,
    num_shards: int,
    alone: frozenset[int] = frozenset(),
    first: frozenset[int] = frozenset(),
    alignment: int = ALIGNMENT,
) -> BucketLayout:
    """Lay items of `sizes` elements out in buckets of about `bucket_size` elements.

    An item is never cut by a bucket's end, so one that is larger than `bucket_size` makes a bucket of its own, as do
    the items in `alone`; the items in `first` begin one.

    Raises:
        ValueError: a size, the bucket size or the number of shards is not positive.
    """
    if bucket_size < 1 or num_shards < 1 or any(size < 1 for size in sizes):
        raise ValueError(f"sizes, bucket size ({bucket_size}) and number of shards ({num_shards}) must be positive")
    buckets: list[Bucket] = []
    current: list[Placement] = []
    end = 0

    def close() -> None:
        nonlocal current, end
        if current:
            numel = _round_up(end, alignment * num_shards)
            buckets.append(Bucket(len(buckets), tuple(current), numel, num_shards))
        current, end = [], 0

    for index, size in enumerate(sizes):
        if index in alone or index in first or end + size > bucket_size:
            close()
        current.append(Placement(index, end, size))
        end = _round_up(end + size, alignment)
        if index in alone:
            close()
    close()
    return BucketLayout(tuple(buckets), num_shards)
