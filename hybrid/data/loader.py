"""Samples to microbatches of one data-parallel rank.

The position in the data is the number of samples consumed by all ranks together. A microbatch at position p holds, on
rank r of d with b rows, samples `[p + r*b, p + (r+1)*b)`, and moves the position by `d*b`. So the step that starts at
position p with global batch G trains on samples `[p, p+G)` under every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import numpy as np
import torch

from hybrid.data.prefetch import Prefetcher
from hybrid.data.samples import Sample, SampleSource

Batch = tuple[torch.Tensor, ...]
"""(tokens, labels), or (tokens, labels, position_ids, segment_ids), each int64 `[micro_batch_size, seq_length]`."""


def rank_positions(position: int, micro_batch_size: int, dp_rank: int) -> range:
    """The samples of a rank's microbatch when `position` samples were consumed before it."""
    start = position + dp_rank * micro_batch_size
    return range(start, start + micro_batch_size)


def collate(samples: list[Sample]) -> Batch:
    """Stack samples into tensors."""
    return tuple(torch.from_numpy(np.stack(column)) for column in zip(*samples, strict=True))


def _check_rank(micro_batch_size: int, dp_rank: int, dp_size: int) -> None:
    if micro_batch_size < 1 or not 0 <= dp_rank < dp_size:
        raise ValueError(f"micro_batch_size {micro_batch_size} must be positive and rank {dp_rank} in [0, {dp_size})")


class BatchLoader:
    """An endless iterator over the microbatches of one data-parallel rank, read ahead by a thread.

    It never raises StopIteration: after the last sample of an epoch comes the first of the next. Close it, or use it
    in a `with` block.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        dp_rank: int,
        dp_size: int,
        samples_consumed: int = 0,
        prefetch: int | None = None,
    ) -> None:
        """
        Args:
            gradient_accumulation_steps: microbatches of a step; it only decides how far to read ahead.
            samples_consumed: where to start, as `samples_consumed` of a loader under any layout said.
            prefetch: microbatches to read ahead; None is one step, 0 reads each when it is asked for.

        Raises:
            ValueError: a size or position is out of range.
        """
        _check_rank(micro_batch_size, dp_rank, dp_size)
        if samples_consumed < 0:
            raise ValueError(f"samples_consumed is {samples_consumed}; training starts at sample 0")
        self.samples_consumed = samples_consumed
        """Samples of the microbatches given out so far, over all ranks; what a checkpoint stores."""
        self._stride = micro_batch_size * dp_size
        batches = _endless(source, micro_batch_size, dp_rank, self._stride, samples_consumed)
        depth = max(1, gradient_accumulation_steps) if prefetch is None else prefetch
        self._batches: Iterator[Batch] = Prefetcher(batches, depth) if depth else batches

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self.samples_consumed += self._stride
        return batch

    def state(self) -> dict[str, int]:
        """What continues this loader under any layout: pass it to the constructor as keywords."""
        return {"samples_consumed": self.samples_consumed}

    def close(self) -> None:
        """Stop reading ahead."""
        if isinstance(self._batches, Prefetcher):
            self._batches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _endless(source: SampleSource, micro_batch_size: int, dp_rank: int, stride: int, position: int) -> Iterator[Batch]:
    # A function, not a method: the thread must not keep the loader alive.
    while True:
        yield collate([source.read(at) for at in rank_positions(position, micro_batch_size, dp_rank)])
        position += stride


class EvalLoader:
    """One pass over held-out samples: each once, and the same number of microbatches on every rank.

    Rows beyond the last sample are blank (all labels ignored), so a sum over supervised tokens is exact. Every
    iteration starts again from the first sample.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        max_samples: int | None = None,
        multiple_of: int = 1,
        reads: bool = True,
    ) -> None:
        """
        Args:
            max_samples: evaluate at most so many samples, over all ranks; None takes all.
            multiple_of: round the number of microbatches up to a multiple, as a pipeline's step needs it.
            reads: whether the data are needed here; otherwise all rows are blank, for their number and shape.
        """
        _check_rank(micro_batch_size, dp_rank, dp_size)
        self._source = source
        self._micro_batch_size = micro_batch_size
        self._rank = dp_rank
        self._stride = micro_batch_size * dp_size
        self.num_samples = len(source) if max_samples is None else min(len(source), max_samples)
        """Samples evaluated, over all ranks."""
        self._filled = self.num_samples if reads else 0
        batches = -(-self.num_samples // self._stride)
        self._batches = -(-batches // multiple_of) * multiple_of

    def __len__(self) -> int:
        """Microbatches of a pass, the same on every rank."""
        return self._batches

    def __iter__(self) -> Iterator[Batch]:
        for batch in range(self._batches):
            places = rank_positions(batch * self._stride, self._micro_batch_size, self._rank)
            yield collate([self._source.read(at) if at < self._filled else self._source.blank() for at in places])
