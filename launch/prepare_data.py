"""Turn text into token files, and show what they hold: `prepare_data.py inspect PREFIX`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from hybrid.config.parser import ArgumentParser
from hybrid.data import cache
from hybrid.data.inspection import report
from hybrid.data.prepare import Counts, TokenizeJob, named_counts, prepare_corpus
from hybrid.data.sources import plan_units, source_state
from hybrid.output import say


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument(
        "--input", required=True, help="file, folder or glob (jsonl, txt, parquet, .gz, .zst), or a dataset"
    )
    parser.add_argument("--tokenizer", required=True, help="a folder, a Hugging Face name, or 'demo'")
    parser.add_argument("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin and .idx")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    parser.add_argument("--text_key", default="text", help="the field that holds the text (default: %(default)s)")
    parser.add_argument("--append_eos", action=argparse.BooleanOptionalAction, default=True, help="end each document")
    parser.add_argument("--overwrite", action="store_true", help="replace a finished PREFIX.bin and .idx")
    parser.add_argument("--split", default="train", help="split of a Hugging Face dataset (default: %(default)s)")
    parser.add_argument("--cache_dir", default=str(cache.default_cache_dir()), help="for the demo tokenizer")
    return parser.parse_args(argv)


def _inspect(argv: Sequence[str]) -> None:
    parser = ArgumentParser(prog="prepare_data.py inspect", description="Show what a token file holds.")
    parser.add_argument("prefix", help="of PREFIX.bin and PREFIX.idx")
    parser.add_argument("--samples", type=int, default=3, help="documents to show (default: %(default)s)")
    parser.add_argument("--tokenizer", help="to decode with; default is the one stored beside the file")
    arguments = parser.parse_args(argv)
    for line in report(arguments.prefix, arguments.samples, arguments.tokenizer):
        say(line)


def _prepare(argv: Sequence[str]) -> None:
    arguments = _arguments(argv)
    units = plan_units(arguments.input, arguments.split)
    given = vars(arguments)
    job = TokenizeJob(**{name: given[name] for name in ("tokenizer", "cache_dir", "text_key", "append_eos")})
    done, start = Counts(), time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("tokenising", total=len(units))

        def progress(counts: Counts) -> None:
            done.add(counts)
            seconds = time.perf_counter() - start
            speed = f"{done.tokens / seconds:,.0f} tokens/s, {done.text_bytes / 1e6 / seconds:,.1f} MB/s"
            bar.update(task, advance=1, description=speed)

        key = cache.fingerprint(arguments.input, source_state(arguments.input))
        info = prepare_corpus(
            units,
            job,
            arguments.output,
            plan_key=key,
            workers=arguments.workers,
            progress=progress,
            overwrite=arguments.overwrite,
        )
    seconds = time.perf_counter() - start
    skipped = named_counts(info.skipped)
    say(f"{info.documents:,} documents, {info.tokens:,} tokens in {seconds:,.1f} s; skipped: {skipped}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; a fault is one line on stderr, exit code 2 where input or arguments are wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["inspect"]:
            _inspect(words[1:])
        else:
            _prepare(words)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"prepare_data.py: error: {error}", file=sys.stderr)
        return 1 if isinstance(error, RuntimeError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
