"""Several documents in one row: attention that stays within each, positions that start anew."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid.model.rope import Rope


def segment_positions(segments: Tensor) -> Tensor:
    """Position of each token in its own document: [b, s] int64 from segment numbers [b, s] that never decrease."""
    index = torch.arange(segments.size(1), device=segments.device).expand_as(segments)
    starts = torch.ones_like(segments, dtype=torch.bool)
    torch.ne(segments[:, 1:], segments[:, :-1], out=starts[:, 1:])
    return index - torch.where(starts, index, 0).cummax(dim=1).values


def segment_mask(segments: Tensor) -> Tensor:
    """[b, 1, s, s], true where a query (row) sees a key (column): not later, and of the same document."""
    same = segments.unsqueeze(2) == segments.unsqueeze(1)
    return same.tril_().unsqueeze(1)


def segment_rope(tables: Rope, segments: Tensor) -> Rope:
    """The tables [s, d] at each token's position in its document: [s, b, d]."""
    positions = segment_positions(segments).t()
    cos, sin = tables
    return cos[positions], sin[positions]
