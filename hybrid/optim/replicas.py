"""Which elements of a gradient are parts of a sum over other ranks, and which are counted in the global norm.

A gradient can be a part for three reasons: under sequence parallelism a norm's weight sees only a shard of the
sequence; a key/value head held by several tensor-parallel ranks feeds other query heads on each; a tied embedding is
used on the first and on the last stage. All three sums are linear, so they are taken on the reduced data-parallel
shards, once a step and on 1/d of the bytes, rather than on every rank's full gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from hybrid.grid import Grid, Group
from hybrid.optim.layout import Piece
from hybrid.tensor_parallel.params import param_spec

Axis = Literal["sequence", "kv", "tied"]


@dataclass(frozen=True)
class Range:
    """Elements `[start, stop)` of a flat parameter that are treated alike."""

    start: int
    stop: int
    axis: Axis | None
    counted: bool


def gradient_ranges(param: torch.Tensor, grid: Grid) -> list[Range]:
    """The model's elements of a parameter, in order; padding is left out."""
    spec = param_spec(param)
    tied = spec.tied and grid.embedding_group is not None
    ranges = []
    for segment in spec.segments:
        if segment.shard.length == 0:
            continue
        if segment.dim == 0:
            row = param.numel() // param.shape[0]
            start, stop = segment.offset * row, (segment.offset + segment.shard.length) * row
        else:
            start, stop = 0, param.numel()
        axis: Axis | None = None
        if spec.sequence_partial:
            axis = "sequence"
        elif segment.partial:
            axis = "kv"
        elif tied:
            axis = "tied"
        counted = segment.shard.owner and not (tied and not grid.is_first_stage)
        ranges.append(Range(start, stop, axis, counted))
    return ranges


class ReplicaGradients:
    """The sums over replicas, and the norm, of one rank's gradient pieces.

    Args:
        params: the trainable parameters.
        pieces: what this rank owns of them.
        views: the flat fp32 gradient of each piece, the same storage in every step.
        counts_norm: false on ranks whose pieces another data-parallel rank counts.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        pieces: Sequence[Piece],
        views: Sequence[torch.Tensor],
        grid: Grid,
        counts_norm: bool,
    ) -> None:
        self._groups: dict[Axis, Group] = {
            "sequence": grid.tensor_group,
            "kv": grid.kv_group,
            "tied": grid.embedding_group,
        }
        self._partial: dict[Axis, list[torch.Tensor]] = {axis: [] for axis in self._groups}
        self._counted: list[torch.Tensor] = []
        self._other: list[torch.Tensor] = []
        for piece, view in zip(pieces, views, strict=True):
            for part in gradient_ranges(params[piece.index], grid):
                start, stop = max(part.start, piece.start), min(part.stop, piece.stop)
                if start >= stop:
                    continue
                mine = view[start - piece.start : stop - piece.start]
                if part.axis is not None:
                    self._partial[part.axis].append(mine)
                (self._counted if part.counted and counts_norm else self._other).append(mine)

    def reduce(self) -> None:
        """Sum the partial gradients over the ranks that hold the other parts; one collective an axis."""
        for axis, views in self._partial.items():
            group = self._groups[axis]
            if group is None or not views:
                continue
            flat = views[0] if len(views) == 1 else torch.cat(views)
            dist.all_reduce(flat, group=group)
            if len(views) > 1:
                torch._foreach_copy_(views, flat.split([view.numel() for view in views]))

    def local_norm(self, device: torch.device) -> torch.Tensor:
        """`[sum of squares of the counted elements, 1 if any element of this rank is not finite]`, fp64."""
        counted = _square_sum(self._counted, device)
        everything = counted + _square_sum(self._other, device)
        return torch.stack([counted, (~torch.isfinite(everything)).double()])


def _square_sum(views: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not views:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(views)).double().square().sum()
