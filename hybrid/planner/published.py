"""Published runs beside the planner's predictions: what its efficiencies were fitted to, and how far off it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hybrid.config.layout import balanced_split
from hybrid.config.model import load_model_config
from hybrid.config.parallel import ParallelConfig
from hybrid.planner.estimate import Estimate, Practice
from hybrid.planner.hardware import load_gpu
from hybrid.planner.search import RECOMPUTE, Candidate, variants
from hybrid.planner.workload import Recompute, Workload

_TABLE = Path(__file__).parent / "published.json"
_SPEEDUPS = Path(__file__).parent / "speedups.json"


@dataclass(frozen=True, kw_only=True)
class Published:
    """One run as its authors report it."""

    name: str
    gpu: str
    model: str | dict[str, Any]
    """A preset, or a config.json."""
    gpus: int
    tp: int
    pp: int
    micro_batch: int
    global_batch: int
    seq_length: int
    interleave: int
    blockwise: bool
    recompute: Recompute | None
    """None where it is not known: then the least that fits."""
    tokens_per_second: float
    """Per GPU, computed from `figure`."""
    figure: str
    """What the source states."""
    layout: Literal["stated", "assumed"]
    basis: Literal["step", "GPU hours"]
    """GPU hours of a whole run may hold more than its steps."""
    source: str
    note: str
    hardware_tflops: float | None = None
    """TFLOP/s and GPU where the source states them with recomputed operations counted, and all of the attention's
    square: 96 l h^2 (1 + s / 6h + V / 16 l h) a token (Narayanan et al. 2021, equation 3)."""
    peak_fraction: float | None = None
    """Of the GPU's peak, as the source states it beside them."""

    def workload(self) -> Workload:
        """The run's layout in this package's terms."""
        model = load_model_config(self.model)
        d = self.gpus // (self.tp * self.pp)
        return Workload(
            model=model,
            parallel=ParallelConfig(
                tensor_model_parallel_size=self.tp,
                pipeline_model_parallel_size=self.pp,
                data_parallel_size=d,
                sequence_parallel=self.tp > 1,
            ),
            layers_per_stage=balanced_split(model, self.pp, self.seq_length),
            seq_length=self.seq_length,
            micro_batch_size=self.micro_batch,
            micro_batches=self.global_batch // (d * self.micro_batch),
        )


@dataclass(frozen=True)
class Comparison:
    """A published run and the fastest variant of its layout that fits."""

    run: Published
    candidate: Candidate | None
    """None where the layout does not fit."""

    @property
    def predicted(self) -> Estimate | None:
        return self.candidate.estimate if self.candidate else None

    @property
    def error(self) -> float | None:
        """Predicted over measured rate, less one."""
        return self.predicted.tokens_per_second / self.run.tokens_per_second - 1 if self.predicted else None

    @property
    def hardware_tflops(self) -> float | None:
        """The prediction, counted as the run's own figure is."""
        stated = self.run.hardware_tflops
        return None if stated is None or self.error is None else stated * (1 + self.error)


def reported_speedups() -> tuple[dict[int, float], str]:
    """(GPUs to speed-up over 8 of them, what is known of where these were reported)."""
    table = json.loads(_SPEEDUPS.read_text(encoding="utf-8"))
    return {int(gpus): speedup for gpus, speedup in table["speedups"].items()}, table["source"]


def published_runs() -> list[Published]:
    """All of the table."""
    return [Published(**values) for values in json.loads(_TABLE.read_text(encoding="utf-8"))]


def runs_with_tflops() -> list[Published]:
    """Those whose source states TFLOP/s with recomputation counted."""
    return [run for run in published_runs() if run.hardware_tflops is not None]


def compare(runs: Sequence[Published]) -> list[Comparison]:
    """Each run's layout with whatever ZeRO stage and recomputation is fastest in the GPU's memory."""
    comparisons = []
    for run in runs:
        practice = Practice(interleave=run.interleave, blockwise=run.blockwise)
        kinds = RECOMPUTE if run.recompute is None else (run.recompute,)
        feasible = [c for c in variants(run.workload(), load_gpu(run.gpu), kinds, practice) if c.fits]
        best = max(feasible, key=lambda c: c.estimate.tokens_per_second, default=None)
        comparisons.append(Comparison(run, best))
    return comparisons
