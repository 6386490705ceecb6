"""A comparison as a table, JSON and a plot."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from benchmarks.measure import Pair

LOSS_TOLERANCE = 2**-12
"""Relative. Peers round to bf16 (2**-8) at other places, of which a mean over 256 tokens leaves a sixteenth; what was
seen is 2**-15. Other data shows from 1.8 times the tolerance on, an update that differs from 2.5 on."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contestant: medians of the paired ratios to the ideal, or the error with which it does not run."""

    layout: str
    who: str
    losses: tuple[float, ...] = ()
    """Of the first steps; none where that means nothing."""
    same_losses: bool | None = None
    """As this package's, to `LOSS_TOLERANCE`; None where nobody has to."""
    wall: float | None = None
    cpu: float | None = None
    spread: float | None = None
    """Half the distance between the quartiles of the wall ratios."""
    seconds: float | None = None
    """Median wall time of the contestant's step."""
    pairs: int = 0
    quiet_pairs: int = 0
    error: str = ""


def same_losses(losses: Sequence[float], reference: Sequence[float]) -> bool:
    """Whether two contestants train alike."""
    return all(math.isclose(loss, other, rel_tol=LOSS_TOLERANCE) for loss, other in zip(losses, reference, strict=True))


def make_row(row: Row, pairs: Sequence[Pair], limit: float) -> Row:
    """`row` with medians over the pairs."""
    walls = sorted(pair.wall for pair in pairs)
    low, _, high = statistics.quantiles(walls, n=4) if len(walls) > 1 else (walls[0],) * 3
    return replace(
        row,
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
        "| layout | who | wall / ideal | CPU time / ideal | step, s | pairs (quiet) | loss of steps 1 and 2 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.error:
            lines.append(f"| {row.layout} | {row.who} | does not run: {_cell(row.error)} | | | | |")
            continue
        losses = ", ".join(f"{loss:.4f}" for loss in row.losses) + " differ!" * (row.same_losses is False)
        lines.append(
            f"| {row.layout} | {row.who} | {row.wall:.3f} ± {row.spread:.3f} | {row.cpu:.3f} | {row.seconds:.3f} "
            f"| {row.pairs} ({row.quiet_pairs}) | {losses} |"
        )
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


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
    labels = [f"{row.layout}: {row.who}" + " (does not run)" * bool(row.error) for row in rows]
    axes.barh(labels, [row.wall or 0.0 for row in rows], xerr=[row.spread or 0.0 for row in rows], height=0.6)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("wall time of a step / the ideal, which communicates nothing")
    figure.savefig(directory / "peers.svg")
