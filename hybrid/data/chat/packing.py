"""Samples into rows of one length, by best-fit decreasing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Packs:
    """Which samples each row holds: those of row k are `members[starts[k]:starts[k + 1]]`."""

    starts: NDArray[np.int64]
    members: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> NDArray[np.int64]:
        """The samples of a row, in their order in it."""
        return self.members[self.starts[index] : self.starts[index + 1]]


def one_each(count: int) -> Packs:
    """A row for every sample."""
    return Packs(np.arange(count + 1), np.arange(count))


def best_fit(lengths: Sequence[int] | NDArray[np.integer], capacity: int) -> Packs:
    """Rows of at most `capacity` tokens: the longest sample first, each into the fullest row that still takes it.

    At most 11/9 of the best number of rows (Johnson 1973). The rows with some free space are found by the lowest bit
    of an integer, so that a sample costs a few operations on it, whatever the number of rows.

    Raises:
        ValueError: a sample is longer than `capacity`.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and int(sizes.max()) > capacity:
        raise ValueError(f"a sample of {int(sizes.max())} tokens does not fit a row of {capacity}")
    rows: list[list[int]] = []
    with_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    spaces = 0  # bit n: some row has n places left
    for sample in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[sample])
        fitting = spaces >> size
        if fitting:
            space = (fitting & -fitting).bit_length() - 1 + size
            row = with_space[space].pop()
            if not with_space[space]:
                spaces &= ~(1 << space)
            rows[row].append(sample)
        else:
            row, space = len(rows), capacity
            rows.append([sample])
        with_space[space - size].append(row)
        spaces |= 1 << (space - size)
    starts = np.cumsum([0, *map(len, rows)])
    return Packs(starts, np.array([sample for row in rows for sample in row], dtype=np.int64))
