"""Several documents in one row: where they lie, and positions that start anew with each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hybrid.model.rope import Rope, rope_at


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents of packed rows; a token sees those of its own that are not after it."""

    lengths: tuple[tuple[int, ...], ...]
    """Tokens of each document, by row."""
    offsets: Tensor
    """int32 [documents + 1]: where each begins, the rows laid end to end, and where the last one ends."""

    @property
    def several(self) -> bool:
        """Whether a row holds more than one."""
        return any(len(row) > 1 for row in self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(max(row) for row in self.lengths)

    @classmethod
    def of(cls, segments: Tensor) -> Documents:
        """From segment numbers [b, s] that never decrease; waits for the device that holds them."""
        b, s = segments.shape
        places = [*_starts(segments).flatten().nonzero().flatten().tolist(), b * s]
        lengths: list[list[int]] = [[] for _ in range(b)]
        for start, stop in pairwise(places):
            lengths[start // s].append(stop - start)
        offsets = torch.tensor(places, dtype=torch.int32, device=segments.device)
        return cls(lengths=tuple(map(tuple, lengths)), offsets=offsets)


Visible = Tensor | Documents
"""What replaces the causal rule: [b, 1, s, s] bool, true where a query (row) sees a key (column); or the documents."""


def _starts(segments: Tensor) -> Tensor:
    """Whether a document begins at a place, [b, s]."""
    starts = torch.ones_like(segments, dtype=torch.bool)
    torch.ne(segments[:, 1:], segments[:, :-1], out=starts[:, 1:])
    return starts


def segment_positions(segments: Tensor) -> Tensor:
    """Position of each token in its own document: [b, s] int64 from segment numbers [b, s] that never decrease."""
    index = torch.arange(segments.size(1), device=segments.device).expand_as(segments)
    return index - torch.where(_starts(segments), index, 0).cummax(dim=1).values


def segment_rope(tables: Rope, segments: Tensor) -> Rope:
    """The tables at each token's position in its document."""
    return rope_at(tables, segment_positions(segments).t())


def document_rope(tables_of: Callable[[int], Rope], documents: Documents) -> Rope:
    """As `segment_rope`, where the tables depend on the length of the document: twice [s, b, 1, d]."""
    tables = {length: tables_of(length) for row in documents.lengths for length in row}
    cos, sin = (
        torch.cat([torch.cat([tables[length][part] for length in row]) for row in documents.lengths], dim=1)
        for part in (0, 1)
    )
    return cos, sin
