"""A flat range of a local parameter as boxes of Hugging Face tensors: pure arithmetic.

A data-parallel shard ends anywhere in a parameter, also in the middle of a row. Each box is contiguous in the range, so
saving and loading are plain copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hybrid.tensor_parallel.params import Segment


@dataclass(frozen=True)
class TensorBox:
    """Elements `[start, stop)` of a flat parameter, as a rectangle of a Hugging Face tensor."""

    segment: Segment
    offset: tuple[int, ...]
    """Its first element in the Hugging Face tensor."""
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel

    @property
    def index(self) -> tuple[slice, ...]:
        """Index into the Hugging Face tensor."""
        return tuple(slice(first, first + size) for first, size in zip(self.offset, self.shape, strict=True))


def tensor_boxes(segments: Sequence[Segment], shape: Sequence[int], start: int, stop: int) -> list[TensorBox]:
    """The model's elements in `[start, stop)` of a flat parameter of `shape`, in order; padding is left out.

    At most three boxes per segment: the rest of a row, whole rows, the beginning of a row.
    """
    columns = math.prod(shape[1:])
    boxes = []
    for segment in segments:
        if segment.shard.length == 0:
            continue
        if segment.dim == 0:
            first_row, rows = segment.offset, segment.shard.length
            row_shift, column_shift = segment.shard.start - segment.offset, 0
        else:
            assert segment.offset == 0 and segment.shard.length == columns, "a column shard is the whole parameter"
            first_row, rows = 0, shape[0]
            row_shift, column_shift = 0, segment.shard.start
        low, high = max(start, first_row * columns), min(stop, (first_row + rows) * columns)
        for row, height, column, width in _rectangles(low, high, columns):
            offset, size = (row + row_shift, column + column_shift), (height, width)
            dims = len(segment.hf_shape)
            boxes.append(TensorBox(segment, offset[:dims], size[:dims], row * columns + column))
    return boxes


def _rectangles(low: int, high: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """(row, rows, column, columns) of the flat range, in order."""
    while low < high:
        row, column = divmod(low, columns)
        if column == 0 and high - low >= columns:
            rows = (high - low) // columns
            yield row, rows, 0, columns
            low += rows * columns
        else:
            width = min(columns - column, high - low)
            yield row, 1, column, width
            low += width
