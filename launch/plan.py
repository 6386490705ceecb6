"""Which layout fits, and how fast: python launch/plan.py --model llama3-70b --gpus 64 --gpu h100 --seq_length 8192"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from hybrid.config.errors import ConfigError
from hybrid.config.load import find_config, load_config, read_config
from hybrid.config.parser import ArgumentParser
from hybrid.config.places import check_file, unwritable
from hybrid.output import say
from hybrid.planner.ask import MOST_GPUS, enough_gpus, gpu_counts, planner_model, request_of, scaling
from hybrid.planner.hardware import gpu_names
from hybrid.planner.published import compare, published_runs, runs_with_tflops
from hybrid.planner.runs import workload_of
from hybrid.planner.search import evaluate, search
from hybrid.planner.text import (
    describe_configured,
    describe_enough,
    describe_published,
    describe_scaling,
    describe_search,
)
from hybrid.planner.write import config_of

NOTHING_FITS = 1
"""Exit code where the answer is that no layout fits."""


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", help="preset, llama-175b, llama-1t, folder with a config.json, JSON file or hub name"
    )
    parser.add_argument("--gpus", type=gpu_counts, metavar="N[,N...]", help="GPUs; several give a scaling table")
    parser.add_argument("--gpu", default="h100", help=f"{', '.join(gpu_names())}, or a JSON file (default: h100)")
    parser.add_argument("--seq_length", type=int, help="tokens per sample (default: of --ds_config, or 4096)")
    parser.add_argument("--global_batch", type=int, help="samples per step (default: of --ds_config, or 1024)")
    parser.add_argument("--ds_config", metavar="FILE|NAME", help="a configuration whose settings to take over")
    parser.add_argument("--top", type=int, default=10, help="layouts to show (default: 10)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the configuration of a layout")
    parser.add_argument("--choice", type=int, default=1, metavar="#", help="with --write: which layout (default: 1)")
    parser.add_argument("--published", action="store_true", help="predictions beside published runs")
    return parser


def main() -> int:
    """Parse, search, print, write; the exit code."""
    args = (parser := _parser()).parse_args()
    try:
        if args.published:
            say("\n".join(describe_published(compare(published_runs()))))
            return 0
        if args.gpus is None or (args.model is None and args.ds_config is None):
            parser.error("--gpus and one of --model and --ds_config are needed")
        return _plan(args)
    except ConfigError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2


def _check_write(path: Path | None, gpus: list[int]) -> None:
    """Before the search: whether there is one configuration to write, and a place for it."""
    if path is None:
        return
    if len(gpus) > 1:
        several = ",".join(map(str, gpus))
        raise ConfigError(
            [f"--write {path} with --gpus {several}: a configuration is for one number of GPUs: give one to --gpus"]
        )
    check_file("--write", path, "my.json")


def _plan(args: argparse.Namespace) -> int:
    if args.top < 1:
        raise ConfigError([f"--top is {args.top}: it must be at least 1"])
    base: dict[str, Any] | None = read_config(find_config(args.ds_config)) if args.ds_config else None
    _check_write(args.write, args.gpus)
    requests = [request_of(base, args.model, n, args.gpu, args.seq_length, args.global_batch) for n in args.gpus]
    if len(requests) > 1:
        say("\n".join(describe_scaling((answers := scaling(requests)), compare(runs_with_tflops()))))
        return 0 if any(best for rows in answers.values() for _, best in rows) else NOTHING_FITS
    request, found = requests[0], search(requests[0])
    if args.write is not None and found.feasible and not 1 <= args.choice <= len(found.feasible):
        raise ConfigError([f"--choice {args.choice} is no layout that fits: choose 1 to {len(found.feasible)}"])
    lines = describe_search(request, found, args.top)
    if args.ds_config and args.model is None:
        own = evaluate(workload_of(load_config(args.ds_config, world_size=request.gpus)), request.gpu)
        lines += describe_configured(own)
    if found.feasible and args.write is not None:
        model = planner_model(args.model) if args.model else (base or {})["hybrid"]["model"]
        tree = config_of(found.feasible[args.choice - 1].workload, model, base)
        try:
            args.write.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise unwritable("--write", args.write, error) from None
        lines += ["", f"wrote {args.write}"]
    say("\n".join(lines))
    if not found.feasible:
        print(f"plan: {describe_enough(request, enough_gpus(request), MOST_GPUS)}", file=sys.stderr)
        return NOTHING_FITS
    return 0


if __name__ == "__main__":
    sys.exit(main())
