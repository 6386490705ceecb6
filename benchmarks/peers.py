"""Step times of this package and its peers on two CPU cores, as multiples of a loop that communicates nothing.

    python -m benchmarks.peers [--layouts dp2 tp2 ...] [--pairs 6] [--small] [--output runs/benchmarks]

Everything trains the same model, in bf16 and on one thread a process. Steps are interleaved in one run: each lies
between two steps of the ideal, a bare loop over the same layers in which every process does its share alone. Pairs in
which another process took a core from the ideal are replaced as far as `--rounds` allows. The losses of everyone's
first two steps are compared with this package's; a peer that cannot run at the installed version is listed with its
error.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid.entry import leave
from hybrid.environment import prepare_process
from hybrid.launcher import spawn_ranks, this_command

if TYPE_CHECKING:
    from benchmarks.alone import Step
    from benchmarks.report import Row
    from benchmarks.workload import Workload

NAMES = ("single", "dp2", "dp2-z2", "tp2", "tp2-sp", "pp2")
RANKS = "BENCHMARK_RANKS"
RESULTS = "BENCHMARK_RESULTS"
"""Set for the processes that measure: how many they are, and where rank 0 leaves its rows."""

Key = tuple[str, str]
"""Layout and contestant."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--pairs", type=int, default=6, help="pairs a ratio is the median of")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of steps after which it takes what there is")
    parser.add_argument("--limit", type=float, default=0.05, help="stalled part of the time that still counts as quiet")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the runner")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"), help="folder for JSON and plot")
    return parser.parse_args()


def measure(args: argparse.Namespace) -> None:
    """What a rank does: all layouts for its number of processes."""
    import torch

    from benchmarks.alone import bare_loop
    from benchmarks.contestants import LAYOUTS
    from benchmarks.measure import interleave
    from benchmarks.report import make_row
    from benchmarks.workload import FULL, SMALL
    from hybrid.environment import init_distributed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    init_distributed()
    torch.set_num_threads(1)
    workload = SMALL if args.small else FULL
    ranks = int(os.environ[RANKS])
    chosen = [name for name in args.layouts if LAYOUTS[name].ranks == ranks]
    rows = []
    for share in dict.fromkeys(LAYOUTS[name].share for name in chosen):
        steps, found = line_up([name for name in chosen if LAYOUTS[name].share == share], workload)
        ideal = bare_loop(workload.share(share))
        rounds = max(args.rounds, args.pairs)
        pairs = interleave(ideal, steps, pairs=args.pairs, limit=args.limit, rounds=rounds)
        rows += [make_row(row, pairs[key], args.limit) if key in pairs else row for key, row in found.items()]
        if os.environ["RANK"] == "0":  # at once: a run that is ended in the middle has measured for minutes
            Path(os.environ[RESULTS]).write_text(json.dumps([asdict(row) for row in rows]))
    torch.distributed.destroy_process_group()


def line_up(names: list[str], workload: Workload) -> tuple[dict[Key, Step], dict[Key, Row]]:
    """The steps of all contestants that run, and everybody's row; a collective call."""
    from benchmarks.contestants import PACKAGE, comparable, started
    from benchmarks.report import Row, same_losses

    steps, rows = {}, {}
    for name in names:
        reference: tuple[float, ...] = ()
        for who, contestant in started(name, workload):
            if isinstance(contestant, str):
                rows[name, who] = Row(layout=name, who=who, error=contestant)
                continue
            steps[name, who], losses = contestant.step, contestant.losses
            if who == PACKAGE:
                reference = losses
            same = same_losses(losses, reference) if reference and comparable(name, who) else None
            rows[name, who] = Row(layout=name, who=who, losses=losses, same_losses=same)
    return steps, rows


def main() -> int:
    """Start one set of processes for each number of ranks, then report."""
    args = parse()
    if RANKS in os.environ:
        measure(args)
        return 0
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    prepare_process()
    from benchmarks.contestants import LAYOUTS
    from benchmarks.report import Row, conditions, table, write

    rows: list[Row] = []
    code = 0
    for ranks in sorted({LAYOUTS[name].ranks for name in args.layouts}):
        with tempfile.TemporaryDirectory() as directory:
            results = Path(directory) / "rows.json"
            os.environ |= {RANKS: str(ranks), RESULTS: str(results)}
            code = code or spawn_ranks(ranks, this_command())
            if results.exists():
                rows += [Row(**row) for row in json.loads(results.read_text())]
    if rows:
        print(table(rows))
        print(json.dumps(conditions()))
        write(rows, args.output)
    return code


if __name__ == "__main__":
    leave(main)
