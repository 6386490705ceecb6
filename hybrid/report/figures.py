"""The report's pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from hybrid.metrics.timeline import WORK, Event, bubble_ratio
from hybrid.planner.text import stage_name
from hybrid.planner.workload import Workload
from hybrid.report.data import RunData

matplotlib.use("Agg")

_COLORS = ("#1f6f8b", "#d1603d", "#5a8f3c", "#8a4f9e", "#b8860b", "#4a4a4a")
_STYLES = ("-", "--", "-.")
"""Of the first run's line and the later ones', which let it be seen where they coincide."""
_PARTS = {
    "parameters": "#1f6f8b",
    "frozen": "#8fb7c5",
    "gradients": "#5a8f3c",
    "states": "#d1603d",
    "buckets": "#b8860b",
    "activations": "#8a4f9e",
    "working": "#9a9a9a",
}
_INSTRUCTIONS = {"ForwardPass": "#1f6f8b", "BackwardPass": "#d1603d"}
_OTHER = "#b9b9b9"
_SMOOTH_FROM = 100
"""Points from which a line is drawn smoothed over its raw values."""
_NOISY = ("loss", "grad_norm", "tokens_per_second_per_device", "tflops_per_device", "mfu", "step_time")
_LOG_RANGE = 30
"""Largest over smallest value from which the axis is logarithmic."""
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def _figure(height: float = 3.2) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8.6, height), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _smooth(values: Sequence[float]) -> list[float]:
    """Mean over a twenty-fifth of the points around each: it does not lag, as an exponential average would."""
    half = max(2, len(values) // 50)
    parts = (values[max(0, index - half) : index + half + 1] for index in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def curve(runs: Sequence[RunData], key: str, label: str, scale: float = 1.0) -> Figure | None:
    """A metric over the steps of all runs, skipped steps marked; None where no run has it."""
    figure, axes = _figure()
    shown: list[float] = []
    for index, (run, color) in enumerate(zip(runs, _colors(len(runs)), strict=True)):
        style = _STYLES[index % len(_STYLES)]
        steps, values = run.column(key)
        values = [value * scale for value in values]
        if not values:
            continue
        shown += values
        smooth = len(values) >= _SMOOTH_FROM and key in _NOISY
        axes.plot(steps, values, color=color, linewidth=0.8 if smooth else 1.5, alpha=0.3 if smooth else 1.0,
                  linestyle="-" if smooth else style,
                  marker="o" if len(values) == 1 else None, label=None if smooth else run.name)  # fmt: skip
        if smooth:
            axes.plot(steps, _smooth(values), color=color, linewidth=1.6, linestyle=style, label=run.name)
        for step in run.skipped:
            axes.axvline(step, color=color, linestyle=":", linewidth=1)
        if key == "loss" and run.evaluations:
            points = [(line["step"], line["eval_loss"]) for line in run.evaluations]
            axes.plot(*zip(*points, strict=True), "D", color=color, markersize=5, markeredgecolor="white",
                      label=f"{run.name}, held out")  # fmt: skip
    if not shown:
        return None
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_ylabel(label)
    if min(shown) > 0 and max(shown) / min(shown) > _LOG_RANGE:
        axes.set_yscale("log")
    if len(runs) > 1 or key == "loss":
        axes.legend(frameon=False, fontsize=9)
    return figure


def _colors(count: int) -> list[str]:
    return [_COLORS[index % len(_COLORS)] for index in range(count)]


def memory(run: RunData) -> Figure | None:
    """Each rank's bytes: planned, by part, beside what it measured."""
    if not run.ranks:
        return None
    figure, axes = _figure(1.4 + 0.55 * len(run.ranks))
    longest = max(run.planned_memory(row.stage).total for row in run.ranks)
    unit, size = next((name, size) for name, size in _UNITS.items() if longest >= size or name == "KiB")
    labels, ticks = [], []
    for position, row in enumerate(run.ranks):
        planned = run.planned_memory(row.stage)
        parts = {key: getattr(planned, key) for key in (*run.held, "activations")}
        parts["working"] = planned.total - sum(parts.values())
        measured = {key: row.measured[key] for key in run.held}
        for offset, values in ((-0.2, parts), (0.2, measured)):
            left = 0.0
            for key, value in values.items():
                axes.barh(position + offset, value / size, 0.36, left=left, color=_PARTS[key])
                left += value / size
        if row.peak is not None and row.peak <= 2 * longest:
            axes.plot(row.peak / size, position + 0.2, "|", color="black", markersize=16, markeredgewidth=2)
        elif row.peak is not None:
            text = f"  the process, at most {row.peak / 2**30:.2f} GiB"
            axes.text(sum(row.measured.values()) / size, position + 0.2, text, va="center", fontsize=8)
        labels += [f"rank {row.rank} planned", "measured"]
        ticks += [position - 0.2, position + 0.2]
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"{unit} (measured: what stays between steps; | the most the device has held)")
    shown = (*run.held, "activations", "working")
    axes.legend(handles=[Patch(color=_PARTS[key], label=key) for key in shown], frameon=False, fontsize=8,
                ncols=len(shown), loc="lower center", bbox_to_anchor=(0.5, 1.0))  # fmt: skip
    return figure


def traffic(run: RunData) -> Figure | None:
    """Bytes rank 0 sends in a step, by axis and collective: planned beside measured."""
    if not run.traffic:
        return None
    planned = run.planned_traffic()
    keys = sorted({(axis, op) for source in (planned, run.traffic) for axis, ops in source.items() for op in ops})
    figure, axes = _figure(1.2 + 0.5 * len(keys))
    for position, (axis, op) in enumerate(keys):
        for offset, source, color in ((-0.2, planned, "#9ab8c4"), (0.2, run.traffic, "#1f6f8b")):
            value = source.get(axis, {}).get(op, {}).get("wire_bytes", 0)
            axes.barh(position + offset, max(value, 1), 0.36, color=color)
            axes.text(max(value, 1) * 1.1, position + offset, f"{value:,}", va="center", fontsize=8)
    axes.set_yticks(range(len(keys)), [f"{axis} {op}" for axis, op in keys], fontsize=9)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(right=axes.get_xlim()[1] * 20)
    axes.set_xlabel("bytes on the wire in a step of rank 0")
    axes.legend(handles=[Patch(color="#9ab8c4", label="planned"), Patch(color="#1f6f8b", label="measured")],
                frameon=False, fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))  # fmt: skip
    return figure


def timeline(ranks: Mapping[int, tuple[int, list[Event]]], w: Workload) -> Figure:
    """Forward and backward passes of every rank of a step, waiting and sending between them."""
    figure, axes = _figure(1.2 + 0.42 * len(ranks))
    for position, (_, (_, events)) in enumerate(sorted(ranks.items())):
        for event in events:
            color = _INSTRUCTIONS.get(event.name, _OTHER)
            height = 0.8 if event.name in WORK else 0.35
            axes.barh(position, event.seconds * 1e3, height, left=event.start * 1e3, color=color, edgecolor="white",
                      linewidth=0.4)  # fmt: skip
    names = [f"rank {rank} ({stage_name(w, stage)})" for rank, (stage, _) in sorted(ranks.items())]
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("ms since the step began")
    handles = [Patch(color=_INSTRUCTIONS[name], label=name) for name in WORK]
    axes.legend(handles=[*handles, Patch(color=_OTHER, label="loading, sending, waiting, stepping")], frameon=False,
                fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))  # fmt: skip
    return figure


def measured_bubble(ranks: Mapping[int, tuple[int, list[Event]]]) -> float | None:
    """The bubble of the first rank of each stage; None of a single stage."""
    by_stage: dict[int, Sequence[Event]] = {}
    for _, (stage, events) in sorted(ranks.items()):
        by_stage.setdefault(stage, events)
    return bubble_ratio(list(by_stage.values())) if len(by_stage) > 1 else None


CURVES: tuple[tuple[str, Callable[[Sequence[RunData]], Figure | None]], ...] = (
    ("Loss", lambda runs: curve(runs, "loss", "nats per token")),
    ("Learning rate", lambda runs: curve(runs, "lr", "learning rate")),
    ("Gradient norm", lambda runs: curve(runs, "grad_norm", "norm before clipping")),
    ("Throughput", lambda runs: curve(runs, "tokens_per_second_per_device", "tokens per second and device")),
    ("Model FLOPs", lambda runs: curve(runs, "tflops_per_device", "TFLOP/s per device")),
    ("Model FLOPs utilisation", lambda runs: curve(runs, "mfu", "% of peak", scale=100)),
    ("Step time", lambda runs: curve(runs, "step_time", "seconds")),
)
"""Title and picture of every metric that is compared between runs."""
