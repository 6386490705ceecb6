"""What a run's folder says: configuration, metrics, summary and timeline, with the planner's expectations beside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hybrid.config.errors import ConfigError
from hybrid.config.load import load_config
from hybrid.config.run import RunConfig
from hybrid.metrics.recorder import EVALUATIONS_FILE, METRICS_FILE
from hybrid.metrics.timeline import FOLDER, Event, read_timeline, timeline_steps
from hybrid.planner.memory import RankMemory, rank_memory
from hybrid.planner.runs import workload_of
from hybrid.planner.traffic import step_transfers
from hybrid.planner.traffic import summarize as summarize_plan
from hybrid.planner.workload import Workload

Traffic = Mapping[str, Mapping[str, Mapping[str, int]]]
_WARM = 2
"""Steps that do not count in a run's rates: they build caches and buffers."""


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """A rank's place and what it held."""

    rank: int
    stage: int
    measured: dict[str, int]
    """Bytes of `parameters`, `frozen` ones, `gradients`, `states`, `buckets`."""
    peak: int | None
    """Most bytes it has held; None where that was not written down."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """One run."""

    name: str
    config: RunConfig
    workload: Workload
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    ranks: list[RankRow]
    traffic: Traffic
    timelines: dict[int, dict[int, tuple[int, list[Event]]]]
    """step -> rank -> (stage, events)."""

    @property
    def held(self) -> tuple[str, ...]:
        """What a rank holds between steps, by name; `frozen` weights where there are any."""
        frozen = ("frozen",) if self.workload.lora is not None else ()
        return ("parameters", *frozen, "gradients", "states", "buckets")

    def planned_memory(self, stage: int) -> RankMemory:
        """What the planner expects of a rank of a stage."""
        return rank_memory(self.workload, stage)

    def planned_traffic(self) -> Traffic:
        """What the planner expects rank 0 to move in a step."""
        return summarize_plan(step_transfers(self.workload, 0))

    def column(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, where it has one."""
        points = [(line["step"], line[key]) for line in self.steps if line.get(key) is not None]
        return [step for step, _ in points], [float(value) for _, value in points]

    @property
    def skipped(self) -> list[int]:
        """Steps whose gradients were not finite."""
        return [line["step"] for line in self.steps if line["skipped"]]

    def typical(self, key: str) -> float | None:
        """Median of a metric once the run is warm."""
        _, values = self.column(key)
        warm = values[_WARM:] or values
        return median(warm) if warm else None


def load_run(path: Path) -> RunData:
    """Read a run's folder.

    Raises:
        ConfigError: it is not one.
    """
    config_file, metrics_file = path / "config.json", path / METRICS_FILE
    missing = [file.name for file in (config_file, metrics_file) if not file.is_file()]
    if missing:
        raise ConfigError([f"{path} is not the folder of a run: it has no {' and no '.join(missing)}"], str(path))
    config = load_config(str(config_file))
    summary_file, folder = path / "summary.json", path / FOLDER
    summary = json.loads(summary_file.read_text()) if summary_file.is_file() else {}
    return RunData(
        name=path.resolve().name,
        config=config,
        workload=workload_of(config),
        steps=_lines(metrics_file),
        evaluations=_lines(path / EVALUATIONS_FILE),
        ranks=_ranks(summary),
        traffic=summary.get("traffic_of_one_step", {}),
        timelines={step: read_timeline(folder, step) for step in timeline_steps(folder)},
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; one that a kill cut short is left out."""
    if not path.is_file():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def _ranks(summary: Mapping[str, Any]) -> list[RankRow]:
    by_rank: Sequence[Mapping[str, Any]] = summary.get("ranks", [])
    if not by_rank and "memory_bytes" in summary:
        by_rank = [{"rank": 0, "stage": 0, "memory_bytes": summary["memory_bytes"]}]
    return [
        RankRow(
            rank=r["rank"],
            stage=r["stage"],
            measured={"frozen": 0, **r["memory_bytes"]},  # older runs did not write it down
            peak=r.get("peak_memory_bytes"),
        )
        for r in by_rank
    ]
