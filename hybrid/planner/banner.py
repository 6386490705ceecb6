"""What a run is about to do, in a few lines at its start."""

from __future__ import annotations

from hybrid.config.cautions import long_warmup
from hybrid.config.describe import describe, rank_map
from hybrid.config.model import num_parameters
from hybrid.config.run import RunConfig
from hybrid.planner.memory import fullest_stage
from hybrid.planner.runs import workload_of
from hybrid.planner.text import counted, layout_name, stage_name, trained_name
from hybrid.planner.workload import Workload

_GIB = 2**30
_MAP_ROWS = 16
"""A longer rank map is left to --dry_run."""


def banner(run: RunConfig, steps_done: int = 0) -> list[str]:
    """Model and layout, what each step takes, what it should need, what runs behind what, and the rank map."""
    w = workload_of(run)
    steps = run.hybrid.training.train_steps
    lines = [
        f"{num_parameters(run.model):,} parameters in {run.precision}, {layout_name(w)}, ZeRO {run.zero_stage}, "
        f"recompute {w.recompute}, training {trained_name(w.lora)}",
        f"{run.tokens_per_step:,} tokens a step: {counted(w.micro_batch_size, 'sample')} x "
        f"{counted(w.micro_batches, 'microbatch', 'microbatches')} x {counted(w.d, 'replica')} of "
        f"{w.seq_length} tokens",
        f"steps {steps_done + 1} to {steps}, {(steps - steps_done) * run.tokens_per_step:,} tokens to go"
        if steps_done < steps
        else f"step {steps_done} of {steps}: nothing to train",
        memory_planned(w),
        f"overlap: {', '.join(_overlaps(w)) or 'nothing to overlap'}",
    ]
    table = rank_map(run)
    if len(table) <= _MAP_ROWS:
        lines += table
    return lines


def memory_planned(w: Workload) -> str:
    """What the rank that needs most should hold, by part; `parameters` are the frozen ones too."""
    stage, memory = fullest_stage(w)
    return (
        f"memory planned: {memory.total / _GIB:.2f} GiB on {stage_name(w, stage)} = "
        f"parameters {(memory.parameters + memory.frozen) / _GIB:.2f} + "
        f"gradients {(memory.gradients + memory.buckets + memory.wire) / _GIB:.2f} + "
        f"states {memory.states / _GIB:.2f} + activations {memory.activations / _GIB:.2f} + "
        f"working {max(memory.logits, memory.working) / _GIB:.2f}"
    )


def dry_run(run: RunConfig) -> str:
    """What `--dry_run` of training prints: the configuration, who holds what, the memory it should take, a caution."""
    lines = [describe(run), memory_planned(workload_of(run))]
    if caution := long_warmup(run):
        lines.append(f"caution: {caution}")
    return "\n".join(lines)


def _overlaps(w: Workload) -> list[str]:
    """What this run's communication hides behind."""
    found = []
    if w.t > 1 and w.lora is None:
        found.append("tensor-parallel gradients behind weight gradients")
    if w.d > 1:
        by_microbatch = w.zero_stage == 2 and w.gradient_sharding == "microbatch"
        found.append(f"gradient reduction behind {'every' if by_microbatch else 'the last'} backward")
        if w.zero_stage > 0 and w.overlap:
            found.append("weight gathers behind the next forward")
    return found
