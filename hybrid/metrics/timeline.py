"""When each pipeline instruction ran on each rank, as a trace for Perfetto, and the bubble it shows."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from types import TracebackType
from typing import Any

import torch

FOLDER = "timeline"
WORK = ("ForwardPass", "BackwardPass")
"""The instructions that are neither communication nor waiting."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One instruction of one rank."""

    name: str
    start: float
    """Seconds since the step began on this rank."""
    end: float
    micro_batch: int
    """Counts the instructions of this name in the step, from 0."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


class _HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class _DeviceClock:
    """CUDA events: the host runs ahead of the device, so its clock would show launches."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


class TimelineRecorder:
    """Records the instructions that a pipeline engine executes while the recorder is entered.

    DeepSpeed's engine looks each instruction's method up in `_INSTRUCTION_MAP`; the recorder puts timed ones in front
    of them on this engine alone, and takes them away again, so that a step without it costs nothing.

    Args:
        engine: a DeepSpeed PipelineEngine.
        clock: `mark()` and `seconds(mark, mark)`; by default the device's.
    """

    def __init__(self, engine: Any, clock: Any = None) -> None:
        self._engine = engine
        self._clock = clock or (_DeviceClock() if torch.device(engine.device).type == "cuda" else _HostClock())
        self._marks: list[tuple[str, Any, Any]] = []
        self._began: Any = None

    def __enter__(self) -> TimelineRecorder:
        self._marks.clear()
        self._engine._INSTRUCTION_MAP = {
            kind: self._timed(kind.__name__, method) for kind, method in type(self._engine)._INSTRUCTION_MAP.items()
        }
        self._began = self._clock.mark()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._engine._INSTRUCTION_MAP

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(engine: Any, *args: Any, **kwargs: Any) -> Any:
            start = self._clock.mark()
            result = method(engine, *args, **kwargs)
            self._marks.append((name, start, self._clock.mark()))
            return result

        return run

    @property
    def events(self) -> list[Event]:
        """What was recorded, in order; waits for the device."""
        counts: dict[str, int] = {}
        events = []
        for name, start, end in self._marks:
            counts[name] = counts.get(name, -1) + 1
            first = self._clock.seconds(self._began, start)
            events.append(
                Event(name=name, start=first, end=first + self._clock.seconds(start, end), micro_batch=counts[name])
            )
        return events


def busy_seconds(events: Sequence[Event]) -> float:
    """Seconds of forward and backward passes: what a slow rank or stage has more of than the others."""
    return sum(event.seconds for event in events if event.name in WORK)


@dataclass(frozen=True)
class Straggler:
    """The rank that worked longest in a step."""

    rank: int
    stage: int
    ratio: float
    """Its busy time over the median's."""

    def describe(self, place: str | None = None) -> str:
        """The line for the log; `place` names what the rank holds, where that is more than its stage."""
        place = place or f"stage {self.stage}"
        return f"slowest rank {self.rank} ({place}): {self.ratio:.2f} x the median rank's busy time"


def find_straggler(busy: Sequence[float], stages: Sequence[int]) -> Straggler:
    """Of each rank's busy seconds and pipeline stage, the slowest."""
    rank = max(range(len(busy)), key=lambda r: busy[r])
    usual = median_low(busy)
    return Straggler(rank, stages[rank], busy[rank] / usual if usual > 0 else 1.0)


def bubble_ratio(by_stage: Sequence[Sequence[Event]]) -> float:
    """Idle over busy time of the busiest stage, from its first pass to its last: (p - 1) / m for equal stages.

    A pipeline of equal stages fills and drains in p - 1 slots (Huang et al. 2019; Narayanan et al. 2021, section 2.2).
    """
    work = [[event for event in events if event.name in WORK] for events in by_stage]
    span = max(e.end for events in work for e in events) - min(e.start for events in work for e in events)
    busy = max(sum(event.seconds for event in events) for events in work)
    return span / busy - 1


def write_timeline(folder: Path, step: int, rank: int, stage: int, events: Sequence[Event]) -> Path:
    """One rank's part of a step's timeline: Chrome's trace format, with stage and rank as process and thread."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step}-rank-{rank}.json"
    path.write_text(json.dumps({"traceEvents": list(_chrome(events, rank, stage)), "step": step}) + "\n")
    return path


def _chrome(events: Sequence[Event], rank: int, stage: int) -> Iterator[Mapping[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": stage, "args": {"name": f"stage {stage}"}}
    yield {"ph": "M", "name": "thread_name", "pid": stage, "tid": rank, "args": {"name": f"rank {rank}"}}
    for event in events:
        yield {
            "ph": "X",
            "name": event.name,
            "cat": "pipeline",
            "pid": stage,
            "tid": rank,
            "ts": event.start * 1e6,
            "dur": event.seconds * 1e6,
            "args": {"micro_batch": event.micro_batch},
        }


def read_timeline(folder: Path, step: int) -> dict[int, tuple[int, list[Event]]]:
    """rank -> (stage, events) of a step, from the files of its ranks."""
    ranks = {}
    for path in sorted(folder.glob(f"step-{step}-rank-*.json")):
        trace = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
        events = [
            Event(
                name=e["name"],
                start=e["ts"] / 1e6,
                end=(e["ts"] + e["dur"]) / 1e6,
                micro_batch=e["args"]["micro_batch"],
            )
            for e in trace
        ]
        if trace:
            ranks[int(trace[0]["tid"])] = (int(trace[0]["pid"]), events)
    return ranks


def timeline_steps(folder: Path) -> list[int]:
    """The steps that were recorded."""
    return sorted({int(path.name.split("-")[1]) for path in folder.glob("step-*-rank-*.json")})


@contextmanager
def profiled(path: Path, device: torch.device) -> Iterator[None]:
    """torch.profiler around a step; the trace for Perfetto is written to `path`."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        yield
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
