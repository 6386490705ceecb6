"""What a layer needs to know about the tensor-parallel axis it lives on."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from hybrid.tensor_parallel.collectives import Group
from hybrid.tensor_parallel.random import RNGTracker


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """This rank's place on the tensor-parallel axis, handed to every layer's constructor."""

    group: Group
    """Ranks that share every matrix; None for one rank."""
    rank: int
    """Position on the axis, which is also the rank within `group`."""
    size: int
    """Ranks on the axis."""
    sequence_parallel: bool = False
    """Keep activations between the tensor-parallel regions cut along the sequence."""
    rng: RNGTracker | None = None
    """Random stream of this rank, for dropout inside tensor-parallel regions; None where there is no dropout."""

    def __post_init__(self) -> None:
        assert (self.group is None) == (self.size == 1), "a group for more than one rank, None for one"
        assert 0 <= self.rank < self.size, "the rank is on the axis"

    @property
    def sequence_sharded(self) -> bool:
        """Hidden states are [s/t, b, h] rather than [s, b, h]."""
        return self.sequence_parallel and self.size > 1

    @classmethod
    def single(cls, rng: RNGTracker | None = None) -> TensorParallel:
        """The axis of one rank: plain computation, no collective."""
        return cls(group=None, rank=0, size=1, rng=rng)

    @classmethod
    def over(cls, group: Group, *, sequence_parallel: bool = False, rng: RNGTracker | None = None) -> TensorParallel:
        """The axis whose ranks are `group`."""
        if group is None or group.size() == 1:
            return cls(group=None, rank=0, size=1, sequence_parallel=sequence_parallel, rng=rng)
        rank = dist.get_rank(group)
        return cls(group=group, rank=rank, size=group.size(), sequence_parallel=sequence_parallel, rng=rng)
