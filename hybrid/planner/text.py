"""Plans in words and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybrid.config.model import num_parameters
from hybrid.config.training import LoraConfig
from hybrid.planner.published import Comparison, reported_speedups
from hybrid.planner.search import RESERVE_GIB, Candidate, Found, Request
from hybrid.planner.workload import Workload

_GIB = 2**30


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines; numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def cell(text: str, width: int) -> str:
        number = text[:1].isdigit() or text[:1] in "+-"
        return text.rjust(width) if number else text.ljust(width)

    return ["  ".join(cell(text, width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def counted(count: int, noun: str, several: str = "") -> str:
    """`1 layer`, `2 layers`; `several` is the plural where it is not the noun with an s."""
    return f"{count} {noun if count == 1 else several or noun + 's'}"


def rounded(count: int) -> str:
    """To a decimal of the unit that suits it: `131`, `4.0 M`, `70.6 B`."""
    if count < 1000:
        return str(count)
    for scale, unit in ((10**3, " K"), (10**6, " M")):
        if round(count / scale, 1) < 1000:
            return f"{count / scale:.1f}{unit}"
    return f"{count / 10**9:.1f} B"


def layout_name(w: Workload) -> str:
    """The layout in short: `TP8+SP PP4 DP2`, with `x2` after PP where each pipeline rank holds 2 stages."""
    chunks = f" x{w.chunks}" if w.chunks > 1 else ""
    return f"TP{w.t}{'+SP' if w.sequence_sharded else ''} PP{w.p}{chunks} DP{w.d}"


def trained_name(lora: LoraConfig | None) -> str:
    """`all weights`, or `LoRA of rank 8 on 7 projections`."""
    return "all weights" if lora is None else f"LoRA of rank {lora.r} on {counted(len(lora.targets), 'projection')}"


def stage_name(w: Workload, stage: int) -> str:
    """What a pipeline rank holds: `stage 0`, or interleaved `stages 0, 2`."""
    stages = w.stages_of(stage)
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def _gradients(w: Workload) -> str:
    return "Z2" if w.zero_stage == 2 and w.gradient_sharding == "microbatch" else f"Z{w.zero_stage}"


def memory_rows(candidates: Sequence[Candidate]) -> list[list[str]]:
    """GiB of the fullest rank, part by part."""
    head = ["layout", "zero", "recompute", "micro", "params", "grads", "states", "buckets", "activations", "logits"]
    rows = [[*head, "working", "total", "GiB"]]
    for c in candidates:
        m, w = c.memory, c.workload
        parts = (
            m.parameters + m.frozen,
            m.gradients,
            m.states,
            m.buckets + m.wire,
            m.activations,
            m.logits,
            m.working,
            m.total,
        )
        sizes = [f"{part / _GIB:.1f}" for part in parts]
        rows.append(
            [layout_name(w), _gradients(w), w.recompute, str(w.micro_batch_size), *sizes, stage_name(w, c.stage)]
        )
    return rows


def time_rows(candidates: Sequence[Candidate]) -> list[list[str]]:
    """Seconds of a step by part, and the rates."""
    head = ["#", "layout", "zero", "recompute", "micro x m", "GiB", "step s", "compute", "tensor", "bubble", "sends"]
    rows = [[*head, "data", "optimizer", "tokens/s/GPU", "TFLOP/s", "MFU"]]
    for number, c in enumerate(candidates, start=1):
        w, t, e = c.workload, c.estimate.time, c.estimate
        seconds = (t.total, t.compute, t.tensor, t.bubble, t.pipeline, t.data, t.optimizer)
        row = [str(number), layout_name(w), _gradients(w), w.recompute, f"{w.micro_batch_size} x {w.micro_batches}"]
        row += [f"{c.memory.total / _GIB:.1f}", *(f"{s:.3f}" for s in seconds)]
        rows.append([*row, f"{e.tokens_per_second:,.0f}", f"{e.tflops:.0f}", f"{e.mfu:.1%}"])
    return rows


def describe_search(request: Request, found: Found, top: int) -> list[str]:
    """The answer to a search."""
    gpu, model = request.gpu, request.model
    lines = [
        f"{rounded(num_parameters(model))} parameters on {request.gpus} x {gpu.name}, "
        f"{counted(request.global_batch, 'sample')} of {request.seq_length} tokens a step, {request.precision}, "
        f"training {trained_name(request.lora)}",
        f"a rank may use {gpu.memory_gib - RESERVE_GIB:.1f} of {gpu.memory_gib} GiB "
        f"({RESERVE_GIB:g} GiB for CUDA, NCCL and fragments)",
        "",
    ]
    shown, many = found.feasible[:top], len(found.feasible)
    if shown:
        lines += [
            f"{counted(many, 'layout fits', 'layouts fit')}; the fastest, seconds by part:",
            *aligned(time_rows(shown)),
        ]
        lines += ["", "GiB of the fullest rank by part:", *aligned(memory_rows(shown))]
    else:
        lines += ["no layout fits"]
    lines += ["", *_why_not(found)]
    return lines


def describe_enough(request: Request, enough: tuple[Request, Candidate] | None, most: int) -> str:
    """How many GPUs a model needs where none of its layouts on those asked for fits."""
    asked = f"no layout fits on {request.gpus} x {request.gpu.name}"
    if enough is None:
        return f"{asked}, nor on any doubling up to {most:,}; above is what takes most memory, or rules layouts out"
    larger, best = enough
    w = best.workload
    return f"{asked}; doubling them, the first that are enough: --gpus {larger.gpus} ({layout_name(w)} {_gradients(w)})"


def describe_configured(candidate: Candidate) -> list[str]:
    """A layout as a configuration has it."""
    return ["", "as configured:", *aligned(time_rows([candidate])), *aligned(memory_rows([candidate]))]


def _why_not(found: Found) -> list[str]:
    lines = []
    if found.too_large:
        lines.append(f"{counted(len(found.too_large), 'does', 'do')} not fit into memory, the closest:")
        for c in found.too_large[:5]:
            parts = {"activations": c.memory.activations, "weights, gradients and states": c.memory.held}
            parts["logits"] = c.memory.logits
            main = max(parts, key=lambda name: parts[name])
            lines.append(
                f"  {layout_name(c.workload)} micro {c.workload.micro_batch_size}: {c.memory.total / _GIB:.1f} GiB of "
                f"{c.available / _GIB:.1f} even with {c.workload.recompute} recomputation and "
                f"{_gradients(c.workload)}, {parts[main] / _GIB:.1f} of it {main}"
            )
    if found.excluded:
        lines.append("ruled out before:")
        lines += [f"  {reason} ({count})" for reason, count in found.excluded.items()]
    return lines


def describe_scaling(
    answers: Mapping[str, Sequence[tuple[Request, Candidate | None]]], large: Sequence[Comparison]
) -> list[str]:
    """A table for each kind of scaling, and what others report; `large`: of runs with hardware TFLOP/s."""
    tables = [line for title, rows in answers.items() for line in (title, *aligned(scaling_rows(rows)), "")]
    return [*tables, *_reports(large)]


def scaling_rows(rows: Sequence[tuple[Request, Candidate | None]]) -> list[list[str]]:
    """The fastest layout of each number of GPUs, and the speed-up over the first that fits, beside reported ones."""
    head = ["GPUs", "batch", "layout", "recompute", "step s", "tokens/s/GPU", "TFLOP/s", "MFU", "speed-up", "ideal"]
    table = [[*head, "reported", "off"]]
    base: tuple[int, float] | None = None
    reported, _ = reported_speedups()
    for request, best in rows:
        if best is None:
            table.append([str(request.gpus), str(request.global_batch), "does not fit", *([""] * 9)])
            continue
        e, w = best.estimate, best.workload
        total = e.tokens_per_second * request.gpus
        base = base or (request.gpus, total)
        row = [str(request.gpus), str(request.global_batch), f"{layout_name(w)} {_gradients(w)}", w.recompute]
        row += [f"{e.time.total:.2f}", f"{e.tokens_per_second:,.0f}", f"{e.tflops:.0f}", f"{e.mfu:.1%}"]
        row += [f"{total / base[1]:.1f}", f"{request.gpus / base[0]:.1f}"]
        if request.gpus > base[0] and {request.gpus, base[0]} <= reported.keys():
            theirs = reported[request.gpus] / reported[base[0]]
            row += [f"{theirs:.1f}", f"{total / base[1] / theirs - 1:+.1%}"]
        table.append([*row, *([""] * (len(table[0]) - len(row)))])
    return table


def _reports(large: Sequence[Comparison]) -> list[str]:
    """What the speed-ups are compared with, and published rates of large runs beside the predicted ones."""
    reported, source = reported_speedups()
    first, *rest = reported
    speedups = ", ".join(f"{reported[gpus]:g} on {gpus:,}" for gpus in rest)
    return [
        f"reported: {speedups}, times {first} GPUs; here over the first row that fits. Source: {source}",
        "",
        "published rates of large runs, recomputed operations counted:",
        *aligned(rate_rows(large)),
        *(f"  {c.run.name}: {c.run.source}; {c.run.note}" for c in large),
    ]


def rate_rows(large: Sequence[Comparison]) -> list[list[str]]:
    """Published and predicted TFLOP/s and GPU."""
    table = [["run", "layout", "published TFLOP/s", "of peak", "predicted TFLOP/s", "of peak", "off"]]
    for c in large:
        run, predicted = c.run, c.hardware_tflops
        row = [run.name, f"TP{run.tp} PP{run.pp}", f"{run.hardware_tflops:.0f}", f"{run.peak_fraction:.0%}"]
        if c.candidate is None or predicted is None or c.error is None:
            row += ["does not fit", "-", "-"]
        else:
            row += [f"{predicted:.0f}", f"{predicted * 1e12 / c.candidate.gpu.matrix_flops:.0%}", f"{c.error:+.1%}"]
        table.append(row)
    return table


def describe_published(comparisons: Sequence[Comparison]) -> list[str]:
    """Predictions beside published figures, with how far they are off."""
    table = [["run", "layout", "fits as", "published", "predicted", "off", "layout is", "source"]]
    for c in comparisons:
        run = c.run
        row = [run.name, f"TP{run.tp} PP{run.pp} x{run.interleave}"]
        if c.predicted is None or c.candidate is None or c.error is None:
            row += ["does not fit", f"{run.tokens_per_second:,.0f}", "-", "-"]
        else:
            w = c.candidate.workload
            row += [f"{_gradients(w)} {w.recompute}", f"{run.tokens_per_second:,.0f}"]
            row += [f"{c.predicted.tokens_per_second:,.0f}", f"{c.error:+.1%}"]
        basis = run.layout if run.basis == "step" else f"{run.layout}, {run.basis}"
        table.append([*row, basis, run.source])
    notes = [f"  {c.run.name}: {c.run.figure}{'; ' + c.run.note if c.run.note else ''}" for c in comparisons]
    return ["tokens per second and GPU", *aligned(table), "", "what the sources say:", *notes]
