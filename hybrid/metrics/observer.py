"""What is watched beside the numbers of each step: profiles, the pipeline's timeline, slow ranks, memory by rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybrid.grid import Grid
from hybrid.metrics.memory import peak_memory_bytes
from hybrid.metrics.timeline import FOLDER, TimelineRecorder, busy_seconds, find_straggler, profiled, write_timeline
from hybrid.optim.distributed import DistributedOptimizer
from hybrid.optim.state import memory_bytes

logger = logging.getLogger(__name__)


class Observer:
    """Watches the steps of a run on one rank; every rank makes one alike.

    Args:
        engine: the pipeline engine.
        output: the run's folder; it gets `profile/` and `timeline/`.
        profile_steps: steps that are profiled and whose instructions are recorded.
        straggler_every: steps between lines that name the slowest rank; 0 for none.
    """

    def __init__(
        self, engine: Any, grid: Grid, output: Path, *, profile_steps: Sequence[int] = (), straggler_every: int = 0
    ) -> None:
        self._engine, self._grid, self._output = engine, grid, output
        self._profile_steps = frozenset(profile_steps)
        self._every = straggler_every if grid.world_size > 1 else 0

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around `train_batch` of a step; where there is nothing to watch it does nothing."""
        profiling = step in self._profile_steps
        comparing = self._every > 0 and step % self._every == 0
        if not profiling and not comparing:
            yield
            return
        recorder = TimelineRecorder(self._engine)
        with ExitStack() as stack:
            if profiling:
                path = self._output / "profile" / f"step-{step}-rank-{self._grid.rank}.json"
                stack.enter_context(profiled(path, torch.device(self._engine.device)))
            stack.enter_context(recorder)
            yield
        events = recorder.events
        if profiling:
            write_timeline(self._output / FOLDER, step, self._grid.rank, self._grid.pipe_rank, events)
        if comparing:
            self._compare(step, busy_seconds(events))

    def _compare(self, step: int, busy: float) -> None:
        seconds = torch.zeros(self._grid.world_size, dtype=torch.float64, device=self._engine.device)
        seconds[self._grid.rank] = busy
        dist.all_reduce(seconds)
        if self._grid.rank == 0:
            stages = [self._grid.topology.get_coord(rank).pipe for rank in range(self._grid.world_size)]
            logger.info("step %d: %s", step, find_straggler(seconds.tolist(), stages).describe())

    def memory_by_rank(self, optimizer: DistributedOptimizer) -> list[dict[str, Any]]:
        """Place and bytes of every rank, in the order of the ranks; a collective call."""
        grid = self._grid
        mine = {
            "rank": grid.rank,
            "stage": grid.pipe_rank,
            "data": grid.data_rank,
            "tensor": grid.tensor_rank,
            "memory_bytes": memory_bytes(optimizer),
            "peak_memory_bytes": peak_memory_bytes(torch.device(self._engine.device)),
        }
        ranks: list[Any] = [mine]
        if grid.world_size > 1:
            ranks = [None] * grid.world_size
            dist.all_gather_object(ranks, mine)
        return ranks
