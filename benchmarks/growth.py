"""Whether a step's cost grows as its work does: time per token over microbatches, time per layer over layers.

    python -m benchmarks.growth [--rounds 5] [--output runs/benchmarks]

One process, the whole engine, bf16. The time of a step of m microbatches is A + B m, and of L layers C + D L: what is
asked is whether B and D stay as they are. So the table has the time that each further microbatch and layer takes, from
one row to the next, beside the mean. Rows are interleaved, and every time is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid.entry import leave
from hybrid.environment import prepare_process

if TYPE_CHECKING:
    from benchmarks.alone import Step
    from benchmarks.workload import Workload

COUNTS = (4, 8, 16, 32)


def workloads() -> dict[tuple[str, int], Workload]:
    """By what grows and how many there are of it."""
    from benchmarks.workload import FULL

    sizes = {"hidden_size": 256, "intermediate_size": 704, "vocab_size": 2048, "num_hidden_layers": COUNTS[0]}
    base = replace(FULL, model={**FULL.model, **sizes, "head_dim": 32}, sequences=COUNTS[0], seq_length=256)
    by_microbatch = {("microbatch", count): replace(base, sequences=count) for count in COUNTS}
    deeper = {count: {**base.model, "num_hidden_layers": count} for count in COUNTS}
    return {**by_microbatch, **{("layer", count): replace(base, model=model) for count, model in deeper.items()}}


def median_times(steps: Mapping[tuple[str, int], Step], rounds: int) -> dict[tuple[str, int], float]:
    """Seconds of each step, the rounds interleaved."""
    seen: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    for step in steps.values():
        step()  # the first one allocates
    for _ in range(rounds):
        for key, step in steps.items():
            start = time.perf_counter()
            step()
            seen[key].append(time.perf_counter() - start)
    return {key: statistics.median(times) for key, times in seen.items()}


def marginal(times: Mapping[tuple[str, int], float], what: str) -> list[dict[str, float]]:
    """What each further `what` costs, in seconds, between one count and the next, and beside the mean of all."""
    mean = (times[what, COUNTS[-1]] - times[what, COUNTS[0]]) / (COUNTS[-1] - COUNTS[0])
    costs = [(less, more, (times[what, more] - times[what, less]) / (more - less)) for less, more in pairwise(COUNTS)]
    return [{"from": less, "to": more, "seconds": cost, "of_mean": cost / mean} for less, more, cost in costs]


def main() -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"))
    args = parser.parse_args()
    prepare_process()
    import torch

    from benchmarks.package import build_engine, package_step
    from hybrid.environment import init_distributed

    init_distributed()
    torch.set_num_threads(1)
    steps = {key: package_step(build_engine(workload), workload) for key, workload in workloads().items()}
    times = median_times(steps, args.rounds)
    growth = {what: marginal(times, what) for what in ("microbatch", "layer")}
    for what, rows in growth.items():
        print(f"| one more {what} | ms | of the mean |\n|---|---|---|")
        for row in rows:
            print(f"| {row['from']:.0f} to {row['to']:.0f} | {row['seconds'] * 1e3:.1f} | {row['of_mean']:.2f} |")
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "growth.json").write_text(json.dumps(growth, indent=2) + "\n")
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    leave(main)
