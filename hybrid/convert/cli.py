"""The command line of the conversion: to-sharded, to-hf, verify, inspect."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from hybrid.config.errors import ConfigError
from hybrid.config.parser import ArgumentParser
from hybrid.convert.adapters import with_merged_adapters
from hybrid.convert.common import DTYPE_NAMES, Job, Result
from hybrid.convert.errors import CheckpointError, listed
from hybrid.convert.hf import parse_size, write_hf
from hybrid.convert.inspection import inspect_checkpoint
from hybrid.convert.logits import TOLERANCE, logits_difference
from hybrid.convert.native import write_native
from hybrid.convert.sharded import plan_layout, write_sharded
from hybrid.convert.sources import Checkpoint, open_checkpoint
from hybrid.convert.verify import compare_checkpoints
from hybrid.output import say

_MOST_WORKERS = 4
"""By default; the disk is busy with fewer."""
_CHECKSUMS = "read every byte of a sharded or training checkpoint and compare with its manifest"


def _common(parser: argparse.ArgumentParser, *, writes: bool) -> None:
    default = min(_MOST_WORKERS, len(os.sched_getaffinity(0)))
    parser.add_argument("--workers", type=int, default=default, help="tensors at a time (default: %(default)s)")
    if writes:
        parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder to write")
        parser.add_argument("--dtype", choices=DTYPE_NAMES, help="of the weights written (default: as they are)")
        parser.add_argument("--overwrite", action="store_true", help="replace a model in the output folder")
        parser.add_argument("--checksums", action="store_true", help=f"first {_CHECKSUMS}; half as fast")


def _source(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--hf", metavar="DIR", help="folder with Hugging Face weights, or a name on the hub")
    group.add_argument("--checkpoint", metavar="DIR", help="sharded or training checkpoint, of any layout")


def _split(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers like 12,10,10") from None


def build_parser() -> ArgumentParser:
    """The arguments of every command."""
    parser = ArgumentParser(prog="convert.py", description="Convert LLaMA checkpoints. Needs no GPU.")
    commands = parser.add_subparsers(dest="command", required=True)

    to_sharded = commands.add_parser("to-sharded", help="to one file per (pipeline, tensor) rank")
    _source(to_sharded)
    to_sharded.add_argument("--tp", type=int, default=1, help="tensor_model_parallel_size (default: %(default)s)")
    to_sharded.add_argument("--pp", type=int, default=1, help="pipeline_model_parallel_size (default: %(default)s)")
    to_sharded.add_argument(
        "--pipeline_split", type=_split, metavar="N,N", help="decoder layers of each stage (default: balanced)"
    )
    to_sharded.add_argument(
        "--format",
        choices=("safetensors", "deepspeed"),
        default="safetensors",
        help="deepspeed: its native layer files",
    )
    _common(to_sharded, writes=True)
    to_sharded.set_defaults(run=_to_sharded)

    to_hf = commands.add_parser("to-hf", help="to a folder that transformers loads")
    _source(to_hf)
    to_hf.add_argument("--max_shard_size", default="5GB", help="of a file of weights (default: %(default)s)")
    _common(to_hf, writes=True)
    to_hf.set_defaults(run=_to_hf)

    verify = commands.add_parser("verify", help="compare a checkpoint with Hugging Face weights, bit for bit")
    verify.add_argument("--hf", required=True, metavar="DIR", help="folder with Hugging Face weights")
    verify.add_argument("--checkpoint", required=True, metavar="DIR", help="checkpoint of any format")
    verify.add_argument("--logits", action="store_true", help="also run both on a few tokens, in fp32")
    _common(verify, writes=False)
    verify.set_defaults(run=_verify)

    inspect = commands.add_parser("inspect", help="say what a folder holds, and what is wrong with it")
    inspect.add_argument("directory", metavar="DIR")
    inspect.add_argument("--checksums", action="store_true", help=_CHECKSUMS)
    inspect.set_defaults(run=_inspect)
    return parser


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, and nothing elsewhere."""
    columns = [TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()]
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def _size(source: Checkpoint) -> int:
    return sum(tensor.nbytes for tensor in source.store.tensors.values())


def _convert(args: argparse.Namespace, write: Callable[[Checkpoint, Job], Result]) -> int:
    source = open_checkpoint(args.hf or args.checkpoint)
    start = time.perf_counter()
    with _bar("converting", _size(source)) as progress:
        job = Job(
            output=args.output,
            dtype=DTYPE_NAMES[args.dtype] if args.dtype else None,
            workers=args.workers,
            overwrite=args.overwrite,
            checksums=args.checksums,
            progress=progress,
        )
        result = write(source, job)
    seconds = time.perf_counter() - start
    if result.ignored:
        say(f"ignored, as the model does not need it: {listed(result.ignored)}")
    if result.masters:
        say("the weights are the fp32 masters of the training checkpoint")
    if result.merged:
        say("the adapters of the training checkpoint are merged into the weights")
    gigabytes = result.nbytes / 1e9
    say(
        f"{args.output}: {result.files} files of weights, {gigabytes:,.2f} GB in {seconds:,.1f} s "
        f"({gigabytes / seconds:,.2f} GB/s)"
    )
    return 0


def _to_sharded(args: argparse.Namespace) -> int:
    def write(source: Checkpoint, job: Job) -> Result:
        layout = plan_layout(source.config(), args.tp, args.pp, args.pipeline_split)
        return (write_sharded if args.format == "safetensors" else write_native)(source, layout, job)

    return _convert(args, write)


def _to_hf(args: argparse.Namespace) -> int:
    try:
        limit = parse_size(args.max_shard_size)
    except ValueError as error:
        raise CheckpointError([f"--max_shard_size: {error}"], "the arguments") from None
    return _convert(args, lambda source, job: write_hf(source, job, limit))


def _verify(args: argparse.Namespace) -> int:
    reference, checkpoint = open_checkpoint(args.hf), with_merged_adapters(open_checkpoint(args.checkpoint))
    with _bar("comparing", _size(reference)) as progress:
        found = compare_checkpoints(reference, checkpoint, workers=args.workers, progress=progress)
    for line in found.differences:
        say(f"different: {line}")
    say(
        f"{found.tensors} tensors, {found.nbytes / 1e9:,.2f} GB: "
        + ("bitwise the same" if not found.differences else f"{len(found.differences)} differences")
    )
    failed = bool(found.differences)
    if args.logits:
        worst = logits_difference(reference.path, checkpoint)
        failed |= not worst <= TOLERANCE
        say(f"logits of transformers and of this package, in fp32: at most {worst:.2e} apart ({TOLERANCE:g} allowed)")
    return int(failed)


def _inspect(args: argparse.Namespace) -> int:
    report = inspect_checkpoint(args.directory, checksums=args.checksums)
    say(str(report))
    return int(bool(report.problems))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0: done, 1: `verify` or `inspect` found faults, 2: refused, with the reasons on stderr."""
    args = build_parser().parse_args(argv)
    try:
        if getattr(args, "workers", 1) < 1:
            raise CheckpointError([f"--workers is {args.workers}: it must be at least 1"], "the arguments")
        status: int = args.run(args)
        return status
    except ConfigError as error:
        print(f"convert.py: {error}", file=sys.stderr)
        return 2
