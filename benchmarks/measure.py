"""Interleaved steps: every contestant's step lies between two of the ideal, and only ratios are kept."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from benchmarks.alone import Step

Key = TypeVar("Key")
PRESSURE = Path("/proc/pressure/cpu")


@dataclass(frozen=True)
class Timing:
    """One step of all ranks."""

    wall: float
    """Seconds of the slowest rank."""
    cpu: float
    """CPU seconds of the mean rank, those of gloo's threads included."""
    stalled: float
    """Part of the time in which some process of the machine waited for a core (Linux's pressure stall information)."""


@dataclass(frozen=True)
class Pair:
    """A step against the mean of the ideal's steps before and after it."""

    step: Timing
    before: Timing
    after: Timing

    @property
    def wall(self) -> float:
        return 2 * self.step.wall / (self.before.wall + self.after.wall)

    @property
    def cpu(self) -> float:
        return 2 * self.step.cpu / (self.before.cpu + self.after.cpu)

    def quiet(self, limit: float) -> bool:
        """Nothing else ran: the ideal's ranks have a core each, so they never wait for one by themselves."""
        return max(self.before.stalled, self.after.stalled) <= limit


FIRST_STEPS = 2
"""Whose losses are kept. The first step also allocates; it shows weights and data, the second the update."""


@dataclass(frozen=True)
class Started:
    """A contestant that runs, and the losses of its first steps: means over the processes."""

    step: Step
    losses: tuple[float, ...]


def start(build: Callable[[], Step]) -> Started | str:
    """Build a contestant and take its first steps; or the error, of the first rank that has one. A collective call.

    An error that only some ranks meet between two collectives leaves the others waiting for them.
    """
    error, losses = "", [torch.tensor(0.0)] * FIRST_STEPS
    try:
        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints while it builds
            step = build()
            losses = [step() for _ in range(FIRST_STEPS)]
    except Exception as problem:  # whatever a peer raises at the installed version
        error = f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"
    errors = [error] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    if any(errors):
        return next(filter(None, errors))
    means = torch.stack([loss.detach().float().cpu() for loss in losses])
    dist.all_reduce(means)
    return Started(step, tuple((means / dist.get_world_size()).tolist()))


def stall_seconds() -> float:
    """Seconds since boot in which some process waited for a core; 0 where the kernel does not say."""
    if not PRESSURE.exists():
        return 0.0
    some = PRESSURE.read_text().split("\n")[0]
    return int(some.rsplit("total=", 1)[1]) * 1e-6


def timed(step: Step) -> Timing:
    """Run a step on all ranks at once; the same timing on every rank."""
    dist.barrier()
    stalled, cpu, start = stall_seconds(), time.process_time(), time.perf_counter()
    step()
    mine = (time.perf_counter() - start, time.process_time() - cpu, stall_seconds() - stalled)
    ranks = [mine] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    walls, cpus, stalls = zip(*ranks, strict=True)
    return Timing(max(walls), statistics.mean(cpus), min(1.0, max(stalls) / max(walls)))


def interleave(
    ideal: Step, contestants: Mapping[Key, Step], *, pairs: int, limit: float, rounds: int
) -> dict[Key, list[Pair]]:
    """At least `pairs` pairs each, quiet ones if `rounds` rounds have enough of them; a collective call."""
    timed(ideal)  # the first step allocates; the contestants have had theirs
    found: dict[Key, list[Pair]] = {name: [] for name in contestants}
    for _ in range(rounds):
        before = timed(ideal)
        for name, step in contestants.items():
            timing, after = timed(step), timed(ideal)
            found[name].append(Pair(timing, before, after))
            before = after
        if all(sum(pair.quiet(limit) for pair in kept) >= pairs for kept in found.values()):
            break
    return {name: _choose(kept, pairs, limit) for name, kept in found.items()}


def _choose(found: list[Pair], pairs: int, limit: float) -> list[Pair]:
    quiet = [pair for pair in found if pair.quiet(limit)]
    return quiet if len(quiet) >= min(pairs, len(found)) else found
