"""The report as one HTML file, with its pictures inside and beside it."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from hybrid.config.model import num_parameters
from hybrid.metrics.timeline import busy_seconds, find_straggler
from hybrid.planner.memory import fullest_stage
from hybrid.planner.text import layout_name, stage_name, trained_name
from hybrid.report import figures
from hybrid.report.data import RunData

_GIB = 2**30

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 980px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; color: #555; }
table { border-collapse: collapse; font-size: 14px; } .wide { overflow-x: auto; }
th, td { text-align: right; padding: .25rem .8rem; border-bottom: 1px solid #e5e5e5; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; color: #555; }
img { max-width: 100%; height: auto; } p.note { color: #555; font-size: 14px; margin: .3rem 0; }
"""


@dataclass(frozen=True)
class Picture:
    """A titled figure of one section."""

    section: str
    title: str
    figure: Figure
    note: str = ""


def pictures(runs: Sequence[RunData]) -> list[Picture]:
    """All pictures that the runs have data for."""
    found = [Picture("Metrics", title, fig) for title, draw in figures.CURVES if (fig := draw(runs)) is not None]
    found += [Picture("Memory", run.name, fig) for run in runs if (fig := figures.memory(run)) is not None]
    found += [
        Picture("Traffic", run.name, fig, _traffic_note(run))
        for run in runs
        if (fig := figures.traffic(run)) is not None
    ]
    for run in runs:
        for step, ranks in run.timelines.items():
            title = f"{run.name}, step {step}"
            found.append(Picture("Timeline", title, figures.timeline(ranks, run.workload), _timeline_note(run, step)))
    return found


def _traffic_note(run: RunData) -> str:
    same = run.planned_traffic() == run.traffic
    return "Every collective was planned, and its bytes exactly." if same else "Planned and measured differ."


def _timeline_note(run: RunData, step: int) -> str:
    ranks = run.timelines[step]
    measured, w = figures.measured_bubble(ranks), run.workload
    if measured is None:
        return "One stage has no bubble."
    places = sorted(ranks.items())
    slowest = find_straggler([busy_seconds(events) for _, (_, events) in places], [stage for _, (stage, _) in places])
    ideal, formula = (w.p - 1) / (w.chunks * w.micro_batches), "(v m)" if w.chunks > 1 else "m"
    return (
        f"Bubble {measured:.1%} of the busiest {'rank' if w.chunks > 1 else 'stage'}'s work; (p - 1) / {formula} = "
        f"{ideal:.1%}; {slowest.describe(stage_name(w, slowest.stage))}."
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = [[html.escape(cell) for cell in row] for row in rows]
    lines = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in body]
    return '<div class="wide"><table>' + "\n".join(lines) + "</table></div>"


def summary_rows(runs: Sequence[RunData]) -> list[list[str]]:
    """The runs in numbers, a column each."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    rows = [["", *(run.name for run in runs)]]
    columns: dict[str, list[str]] = {
        "parameters": [f"{num_parameters(r.config.model):,}" for r in runs],
        "trained": [trained_name(r.workload.lora) for r in runs],
        "layout": [layout_name(r.workload) for r in runs],
        "precision, ZeRO": [f"{r.config.precision}, {r.config.zero_stage}" for r in runs],
        "recompute": [r.workload.recompute for r in runs],
        "tokens a step": [f"{r.config.tokens_per_step:,}" for r in runs],
        "steps": [f"{len(r.steps)} of {r.config.hybrid.training.train_steps}" for r in runs],
        "last loss": [number(r.column("loss")[1][-1] if r.column("loss")[1] else None, ".4f") for r in runs],
        "last held-out loss": [number(r.evaluations[-1]["eval_loss"] if r.evaluations else None, ".4f") for r in runs],
        "tokens/s": [number(r.typical("tokens_per_second"), ",.0f") for r in runs],
        "TFLOP/s per device": [number(r.typical("tflops_per_device"), ".3g") for r in runs],
        "MFU": [number(r.typical("mfu"), ".1%") for r in runs],
        "step time, s": [number(r.typical("step_time"), ".3f") for r in runs],
        "skipped steps": [", ".join(map(str, r.skipped)) or "none" for r in runs],
        "memory planned, GiB": [f"{fullest_stage(r.workload)[1].total / _GIB:.3f}" for r in runs],
    }
    for name, cells in columns.items():
        rows.append([name, *cells])
    return rows


def memory_rows(run: RunData) -> list[list[str]]:
    """What the optimizer of each rank holds, in bytes: planned, measured."""
    rows = [["rank", "stage", *(f"{key} {kind}" for key in run.held for kind in ("planned", "measured"))]]
    for row in run.ranks:
        planned = run.planned_memory(row.stage)
        cells = [f"{value:,}" for key in run.held for value in (getattr(planned, key), row.measured[key])]
        rows.append([str(row.rank), ", ".join(map(str, run.workload.stages_of(row.stage))), *cells])
    return rows


def write_report(runs: Sequence[RunData], output: Path) -> list[Path]:
    """Write `output` (HTML) and its pictures beside it; the paths."""
    title = "Run report: " + ", ".join(run.name for run in runs)
    body = [f"<h1>{html.escape(title)}</h1>", _table(summary_rows(runs))]
    written, section = [output], ""
    for picture in pictures(runs):
        if picture.section != section:
            section = picture.section
            body.append(f"<h2>{section}</h2>")
            if section == "Metrics" and any(run.skipped for run in runs):
                body.append('<p class="note">Dotted lines are steps that were skipped: gradients not finite.</p>')
        buffer = io.BytesIO()
        picture.figure.savefig(buffer, format="png")
        name = re.sub(r"\W+", "-", f"{picture.section} {picture.title}".lower()).strip("-")
        path = output.with_name(f"{output.stem}-{name}.png")
        path.write_bytes(buffer.getvalue())
        written.append(path)
        data = base64.b64encode(buffer.getvalue()).decode()
        body.append(f"<h3>{html.escape(picture.title)}</h3>")
        body.append(f'<img alt="{html.escape(picture.title)}" src="data:image/png;base64,{data}">')
        if picture.note:
            body.append(f'<p class="note">{html.escape(picture.note)}</p>')
    for run in runs:
        if run.ranks:
            body += [f"<h2>Bytes held, {html.escape(run.name)}</h2>", _table(memory_rows(run))]
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )
    output.write_text(page, encoding="utf-8")
    return written
