"""The data pipeline in figures: text to tokens, tokens to samples, samples to batches, and what that is of a step.

    python -m benchmarks.data [--megabytes 32] [--documents 1e7] [--small] [--output runs/benchmarks]

The text is the source code of Python's standard library, one document a file, over and over; the tokenizer is the
demo's, of 2,048 tokens, unless one is named. The index is that of so many documents of about 500 tokens, of which
nothing but the lengths is there. Files stay in the page cache. The training step is that of the 32 M parameters of
`benchmarks.peers`, in one process on one thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from benchmarks.convert import anonymous_bytes
from hybrid.data.indexed import IndexedDataset
from hybrid.data.prepare import TokenizeJob, prepare_corpus
from hybrid.data.sources import plan_units
from hybrid.data.spec import DataSpec
from hybrid.data.tokenizer import load_tokenizer

# What needs torch is imported where it is used: the tokenising processes import this file too.
if TYPE_CHECKING:
    from hybrid.data.samples import GPTDataset, SampleSource

SEQ_LENGTH, MICRO_BATCH = 2048, 4
"""Of the index and the loaders."""
MEAN_DOCUMENT = 500
"""Tokens of the index's documents."""
LAYOUT = {"micro_batch_size": MICRO_BATCH, "gradient_accumulation_steps": 1, "dp_size": 1}

Figures = dict[str, Any]


def timed(work: Callable[[], Any]) -> float:
    """Seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def write_text(path: Path, megabytes: float) -> None:
    """At least so many MB of JSON lines."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    wanted = megabytes * 1e6
    with path.open("w", encoding="utf-8") as out:
        for source in itertools.cycle(files):
            wanted -= out.write(json.dumps({"text": source.read_text(encoding="utf-8", errors="replace")}) + "\n")
            if wanted <= 0:
                return


def tokenising(text: Path, tokenizer: str, folder: Path) -> dict[str, Figures]:
    """Preparing a corpus by one process on one thread, by one on all cores, and by two processes that are started."""
    job = TokenizeJob(tokenizer=tokenizer, cache_dir=str(folder))
    load_tokenizer(tokenizer, folder)  # makes the demo's
    found = {}
    for name, workers, threads in (("1 thread", 1, "false"), ("1 worker", 1, "true"), ("2 workers", 2, "false")):
        start = time.perf_counter()
        with mock.patch.dict(os.environ, TOKENIZERS_PARALLELISM=threads):
            info = prepare_corpus(plan_units(str(text)), job, folder / name, plan_key=name, workers=workers)
        seconds = time.perf_counter() - start
        found[name] = {
            "seconds": seconds,
            "megabytes_per_second": info.text_bytes / 1e6 / seconds,
            "tokens_per_second": info.tokens / seconds,
            "documents": info.documents,
            "tokens": info.tokens,
        }
    return found


class Lengths:
    """A corpus whose documents have lengths and zeros for tokens."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths
        self._zeros = np.zeros(SEQ_LENGTH + 1, np.uint16)

    def read(self, document: int, offset: int, length: int) -> np.ndarray:
        return self._zeros[:length]


def without_tokens(documents: int, folder: Path, part: slice = slice(None)) -> GPTDataset:
    """A training set of `documents` documents, or a part of them, whose index is kept in `folder`."""
    from hybrid.data.samples import GPTDataset

    lengths = np.random.default_rng(0).geometric(1 / MEAN_DOCUMENT, documents).astype(np.int32)
    numbers = np.arange(documents)[part]
    return GPTDataset(Lengths(lengths), numbers, seq_length=SEQ_LENGTH, seed=0, cache_dir=folder, content="lengths")


def indexing(documents: int, folder: Path) -> Figures:
    """An epoch's index: built, opened again from the cache, and read at every thousandth sample."""
    building = without_tokens(documents, folder)
    built = timed(lambda: building.build(1))
    opened = without_tokens(documents, folder)
    before = anonymous_bytes(os.getpid())
    first = timed(lambda: opened.read(0))
    spread = range(1, len(opened), 1000)
    reading = timed(lambda: [opened.read(position) for position in spread])
    samples = len(opened)
    return {
        "documents": documents,
        "samples": samples,
        "seconds": built,
        "seconds_per_million_documents": built / documents * 1e6,
        "seconds_per_million_samples": built / samples * 1e6,
        "bytes_of_the_file": sum(path.stat().st_size for path in folder.glob("index-*.npy")),
        "bytes_in_memory": anonymous_bytes(os.getpid()) - before,
        "first_sample_from_the_cache_seconds": first,
        "scattered_sample_seconds": reading / len(spread),
    }


def resuming(documents: int, folder: Path) -> Figures:
    """From an opened corpus to the first batch: at the start of training, and in the middle of the second epoch."""
    from hybrid.data.blend import BlendedDataset
    from hybrid.data.loader import BatchLoader

    cut = documents // 3

    def parts() -> list[GPTDataset]:
        return [without_tokens(documents, folder, part) for part in (slice(cut), slice(cut, None))]

    makers: dict[str, Callable[[], SampleSource]] = {
        "one corpus": lambda: without_tokens(documents, folder),
        "blended 3 to 7": lambda: BlendedDataset(parts(), [Fraction(3), Fraction(7)]),
        "blended by size": lambda: BlendedDataset.by_size(parts()),
    }
    for dataset in (without_tokens(documents, folder), *parts()):
        dataset.build(2 * len(dataset))
    figures = {}
    for name, make in makers.items():
        for place, epochs in (("start", 0.0), ("middle", 1.5)):
            source = make()  # a new one, that has not opened its index
            position = int(epochs * len(source))
            loader = BatchLoader(source, **LAYOUT, dp_rank=0, samples_consumed=position, prefetch=0)
            figures[f"{name}, {place}"] = timed(lambda loader=loader: next(loader))
    return figures


def starting(prefix: Path, folder: Path) -> Figures:
    """`build_data` of a prepared corpus, with all that it keeps missing, and with it there."""
    from hybrid.data.build import build_data

    spec = DataSpec(
        source=str(prefix), tokenizer=None, seq_length=SEQ_LENGTH, vocab_size=1 << 20, seed=0, eval_fraction=0.05,
        cache_dir=str(folder),
    )  # fmt: skip
    return {"first_seconds": timed(lambda: build_data(spec)), "again_seconds": timed(lambda: build_data(spec))}


def sources(prefix: Path) -> dict[str, SampleSource]:
    """What loaders read: one corpus and a blend of its two parts, samples without and with their documents marked."""
    from hybrid.data.blend import BlendedDataset
    from hybrid.data.samples import GPTDataset

    corpus = IndexedDataset(prefix)
    parts = np.split(np.arange(len(corpus)), [len(corpus) // 3])
    found: dict[str, SampleSource] = {}
    for name, reset in (("plain", False), ("documents marked", True)):
        common: dict[str, Any] = {"seq_length": SEQ_LENGTH, "seed": 0, "reset_attention": reset}
        found[name] = GPTDataset(corpus, np.arange(len(corpus)), **common)
        halves = [GPTDataset(corpus, part, **common) for part in parts]
        found[f"{name}, blended"] = BlendedDataset(halves, [Fraction(3), Fraction(7)])
    return found


def loading(found: dict[str, SampleSource], batches: int) -> dict[str, Figures]:
    """Reading in the calling thread, without a thread that reads ahead: all that it costs."""
    from hybrid.data.loader import BatchLoader

    figures = {}
    for name, source in found.items():
        loader = BatchLoader(source, **LAYOUT, dp_rank=0, prefetch=0)
        next(loader)  # builds the epoch's index
        seconds = timed(lambda loader=loader: [next(loader) for _ in range(batches)])
        figures[name] = {
            "tokens_per_second": batches * MICRO_BATCH * SEQ_LENGTH / seconds,
            "seconds_per_batch": seconds / batches,
        }
    return figures


def of_a_step(prefix: Path, small: bool, rounds: int) -> Figures:
    """A step's microbatches read by themselves, beside the step with batches in memory and with a loader's."""
    import torch

    from benchmarks.alone import BareLlama, loop
    from benchmarks.workload import FULL, SMALL
    from hybrid.data.loader import BatchLoader
    from hybrid.data.samples import GPTDataset

    torch.set_num_threads(1)
    workload = SMALL if small else FULL
    corpus = IndexedDataset(prefix)
    source = GPTDataset(corpus, np.arange(len(corpus)), seq_length=workload.seq_length, seed=0)
    layout = {"micro_batch_size": 1, "gradient_accumulation_steps": workload.sequences, "dp_rank": 0, "dp_size": 1}
    model = BareLlama(workload.config)
    batches = workload.batches(workload.sequences, seed=0)
    step = loop(list(model.parameters()), lambda batch: model(*batch), batches)
    times: dict[str, list[float]] = {"reading": [], "step": [], "step_with_loader": []}
    with (
        BatchLoader(source, **layout, prefetch=0) as reading,
        BatchLoader(source, **layout) as ahead,
    ):

        def take(loader: BatchLoader) -> None:
            # Ids that the model does not have become others: only the time matters.
            batches[:] = [
                (ids % workload.config.vocab_size, labels % workload.config.vocab_size)
                for ids, labels in itertools.islice(loader, workload.sequences)
            ]

        def fed() -> None:
            take(ahead)
            step()

        fed()  # allocates
        for _ in range(rounds):
            times["step"].append(timed(step))
            times["reading"].append(timed(lambda: take(reading)))
            times["step_with_loader"].append(timed(fed))
    medians = {f"{name}_seconds": statistics.median(seconds) for name, seconds in times.items()}
    return {
        **medians,
        "reading_of_step": medians["reading_seconds"] / medians["step_seconds"],
        "with_loader_of_step": medians["step_with_loader_seconds"] / medians["step_seconds"],
    }


def measure(folder: Path, tokenizer: str, megabytes: float, documents: int, small: bool) -> Figures:
    """Every figure."""
    from benchmarks.report import conditions

    text = folder / "text.jsonl"
    write_text(text, megabytes)
    prefix = folder / "1 thread"
    result: Figures = {"conditions": conditions(), "tokenising": tokenising(text, tokenizer, folder)}
    result["index"] = indexing(documents, folder / "index")
    result["start"] = starting(prefix, folder / "start")
    result["loader"] = loading(sources(prefix), 20 if small else 500)
    result["first_batch_seconds"] = resuming(documents, folder / "resume")
    result["step"] = of_a_step(prefix, small, rounds=1 if small else 7)
    return result


def table(result: Figures) -> str:
    """The main figures as Markdown."""
    index, step = result["index"], result["step"]
    lines = ["| part | figure |", "|---|---|"]
    for name, got in result["tokenising"].items():
        speed = f"{got['megabytes_per_second']:.1f} MB/s, {got['tokens_per_second']:,.0f} tokens/s"
        lines.append(f"| tokenising, {name} | {speed} |")
    lines += [
        f"| index of {index['documents']:,} documents, {index['samples']:,} samples | {index['seconds']:.2f} s, "
        f"{index['seconds_per_million_documents']:.3f} s a million documents |",
        f"| its memory | {index['bytes_in_memory'] / 1e6:.1f} MB, mapped file {index['bytes_of_the_file'] / 1e6:.1f} |",
        f"| its first sample from the cache | {index['first_sample_from_the_cache_seconds'] * 1e3:.1f} ms |",
        f"| opening the data, first and again | {result['start']['first_seconds'] * 1e3:.1f} ms, "
        f"{result['start']['again_seconds'] * 1e3:.1f} ms |",
    ]
    lines += [
        f"| loader, {name} | {got['tokens_per_second']:,.0f} tokens/s |" for name, got in result["loader"].items()
    ]
    lines += [f"| first batch, {name} | {got * 1e3:.1f} ms |" for name, got in result["first_batch_seconds"].items()]
    lines.append(
        f"| a step's batches | {step['reading_seconds'] * 1e3:.2f} ms, {step['reading_of_step']:.2%} of the step; "
        f"the step with a loader takes {step['with_loader_of_step']:.3f} of one without |"
    )
    return "\n".join(lines)


def main() -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=32, help="of text that is tokenised")
    parser.add_argument("--tokenizer", default="demo", help="a folder or a Hugging Face name (default: %(default)s)")
    parser.add_argument("--documents", type=float, default=1e7, help="of the index")
    parser.add_argument("--small", action="store_true", help="little of everything, to try the runner")
    parser.add_argument("--folder", help="where to write (default: the folder for temporary files)")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"), help="folder for the JSON")
    args = parser.parse_args()
    size = (1.0, 400_000) if args.small else (args.megabytes, int(args.documents))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = measure(Path(folder), args.tokenizer, *size, args.small)
    print(table(result))
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "data.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
