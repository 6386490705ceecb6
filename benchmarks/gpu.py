"""One GPU: time of a step, tokens per second, MFU, peak memory and the slowest kernels, by `hybrid.kernels`.

    python -m benchmarks.gpu [--model llama3.2-1b] [--seq_length 4096] [--steps 10] [--output runs/benchmarks]

The whole engine in bf16, stage 1, 4 microbatches of 2 sequences of random tokens. torch's operators, the same
compiled, and Liger's run one after the other, each in a process of its own, whose memory begins empty. A model of 1 B
parameters needs about 40 GB.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybrid.config.resolve import resolve_config
from hybrid.environment import init_distributed
from hybrid.metrics.flops import flops_per_token, peak_flops
from hybrid.metrics.memory import peak_memory_bytes
from hybrid.model.kernels import Choice, kernels_problem

MICRO_BATCH, MICRO_BATCHES = 2, 4
WARM_UP = 3
"""Steps that allocate and compile."""
PROFILED = 2
"""Steps under torch.profiler, whose times do not count."""
SHOWN = 12
"""Kernels of the report; the JSON has all."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A configuration's steps."""

    kernels: str
    """As `hybrid.kernels`."""
    device: str
    seconds: float
    """Of a step, the median."""
    tokens: int
    """Of a step."""
    flops_per_token: float
    peak_flops: float | None
    """Of the device in bf16; None where unknown."""
    peak_bytes: int
    seconds_by_kernel: dict[str, float]
    """In a step, all launches of a kernel together."""

    @property
    def mfu(self) -> float | None:
        """Model FLOPs per second, of the device's peak."""
        flops = self.tokens * self.flops_per_token / self.seconds
        return None if self.peak_flops is None else flops / self.peak_flops


def configuration(model: str, seq_length: int, kernels: str) -> dict[str, Any]:
    """Of a run on one device."""
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "hybrid": {"model": model, "kernels": kernels, "data": {"seq_length": seq_length}},
    }


def measure(tree: dict[str, Any], device: torch.device, steps: int) -> Measured:
    """Train on random tokens, in a running world of one."""
    # Only here: DeepSpeed says on import that it finds no GPU, which is for this program to say.
    from hybrid.build import build_engine
    from hybrid.grid import build_grid

    run = resolve_config(tree, 1)
    engine = build_engine(run, build_grid(run.parallel, run.model.num_key_value_heads), device)
    seq_length = run.hybrid.data.seq_length
    rows = torch.randint(run.model.vocab_size, (MICRO_BATCHES, MICRO_BATCH, seq_length + 1), device=device)
    batches = [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]
    on_gpu = device.type == "cuda"

    def step() -> float:
        start = time.perf_counter()
        engine.train_batch(iter(batches))
        engine.optimizer.wait_parameters()
        if on_gpu:
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    for _ in range(WARM_UP):
        step()
    seconds = statistics.median(step() for _ in range(steps))
    peak = peak_memory_bytes(device)
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(PROFILED):
            step()
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    return Measured(
        kernels=run.hybrid.kernels,
        device=name,
        seconds=seconds,
        tokens=run.tokens_per_step,
        flops_per_token=flops_per_token(run.model, seq_length),
        peak_flops=peak_flops(name, "bf16"),
        peak_bytes=peak,
        seconds_by_kernel=_seconds_by_kernel(profiler, on_gpu),
    )


def _seconds_by_kernel(profiler: torch.profiler.profile, on_gpu: bool) -> dict[str, float]:
    """Of a profiled step, the longest first; on a CPU by operator."""
    totals = {
        event.key: event.self_device_time_total if on_gpu else event.self_cpu_time_total
        for event in profiler.key_averages()
    }
    by_time = sorted(totals.items(), key=lambda item: -item[1])
    return {name: total / PROFILED / 1e6 for name, total in by_time if total > 0}


def measure_alone(tree: dict[str, Any], steps: int) -> Measured:
    """`measure` in this process's own world."""
    device = init_distributed()
    try:
        return measure(tree, device, steps)
    finally:
        dist.destroy_process_group()


def report(results: Sequence[Measured]) -> str:
    """Tables: one of all, and one of each one's slowest kernels."""
    lines = [f"{results[0].device}, torch {torch.__version__}", ""]
    lines += ["| kernels | step, ms | tokens/s | MFU | peak, GiB |", "|---|---|---|---|---|"]
    for result in results:
        mfu = "unknown" if result.mfu is None else f"{result.mfu:.1%}"
        rate, peak = result.tokens / result.seconds, result.peak_bytes / 2**30
        lines.append(f"| {result.kernels} | {result.seconds * 1e3:.1f} | {rate:,.0f} | {mfu} | {peak:.2f} |")
    for result in results:
        lines += ["", f"| {result.kernels}: kernel | ms a step | of the step |", "|---|---|---|"]
        for name, seconds in list(result.seconds_by_kernel.items())[:SHOWN]:
            lines.append(f"| {name[:80]} | {seconds * 1e3:.2f} | {seconds / result.seconds:.1%} |")
        busy = sum(result.seconds_by_kernel.values())
        lines.append(f"| all | {busy * 1e3:.2f} | {busy / result.seconds:.1%} |")
    return "\n".join(lines)


def main() -> int:
    """Measure, print the tables, write JSON; 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3.2-1b", help="as hybrid.model")
    parser.add_argument("--seq_length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu measures a GPU, and torch sees none here", file=sys.stderr)
        return 2
    results = []
    choices: tuple[Choice, ...] = ("torch", "compile", "liger")
    for kernels in choices:
        if problem := kernels_problem(kernels, torch.device("cuda")):
            print(f"without {kernels}: {problem}", file=sys.stderr)
            continue
        tree = configuration(args.model, args.seq_length, kernels)
        with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as process:
            results.append(process.submit(measure_alone, tree, args.steps).result())
    print(report(results))
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "gpu.json").write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
