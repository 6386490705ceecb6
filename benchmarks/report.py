"""A comparison as a table, JSON and a plot."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from benchmarks.measure import Pair


@dataclass(frozen=True)
class Row:
    """One contestant: medians of the paired ratios to the ideal."""

    layout: str
    who: str
    wall: float
    cpu: float
    spread: float
    """Half the distance between the quartiles of the wall ratios."""
    seconds: float
    """Median wall time of the contestant's step."""
    pairs: int
    quiet_pairs: int


def make_row(layout: str, who: str, pairs: Sequence[Pair], limit: float) -> Row:
    """Medians over the pairs."""
    walls = sorted(pair.wall for pair in pairs)
    low, _, high = statistics.quantiles(walls, n=4) if len(walls) > 1 else (walls[0],) * 3
    return Row(
        layout,
        who,
        wall=statistics.median(walls),
        cpu=statistics.median(pair.cpu for pair in pairs),
        spread=(high - low) / 2,
        seconds=statistics.median(pair.step.wall for pair in pairs),
        pairs=len(pairs),
        quiet_pairs=sum(pair.quiet(limit) for pair in pairs),
    )


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        "| layout | who | wall / ideal | CPU time / ideal | step, s | pairs (quiet) |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.layout} | {row.who} | {row.wall:.3f} ± {row.spread:.3f} | {row.cpu:.3f} | {row.seconds:.3f} "
            f"| {row.pairs} ({row.quiet_pairs}) |"
        )
    return "\n".join(lines)


def conditions() -> dict[str, str]:
    """The date, the machine and the versions."""
    names = ("torch", "deepspeed", "transformers")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        **{name: version(name) for name in names},
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def write(rows: Sequence[Row], directory: Path) -> None:
    """peers.json, and peers.svg where matplotlib is installed."""
    directory.mkdir(parents=True, exist_ok=True)
    result = {"conditions": conditions(), "rows": [asdict(row) for row in rows]}
    (directory / "peers.json").write_text(json.dumps(result, indent=2) + "\n")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print("no plot: install matplotlib, or this package's extra `plot`")
        return
    figure = Figure(figsize=(8, 0.35 * len(rows) + 1), layout="constrained")
    axes = figure.subplots()
    labels = [f"{row.layout}: {row.who}" for row in rows]
    axes.barh(labels, [row.wall for row in rows], xerr=[row.spread for row in rows], height=0.6)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("wall time of a step / the ideal, which communicates nothing")
    figure.savefig(directory / "peers.svg")
