"""Text to a token file: units are tokenised, by several processes if asked, and merged in the source's order."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

from hybrid.config.places import folder_problem
from hybrid.data import cache
from hybrid.data.corpus import CorpusInfo, scan, tokenizer_folder, tokenizer_info, write_info
from hybrid.data.documents import Piece, read_unit
from hybrid.data.indexed import IndexedDataset, IndexedWriter, dtype_for_vocab, exists, merge
from hybrid.data.sources import Unit
from hybrid.data.tokenizer import TextTokenizer, load_tokenizer

_BATCH_CHARACTERS, _BATCH_PIECES = 1 << 20, 1024
_MERGING = "merging"
"""In the folder of parts: the files of the prefix are not finished, whatever they look like."""
NO_TOKENS = "no tokens"
"""Why a document is skipped that the tokenizer leaves nothing of."""


@dataclass(frozen=True, kw_only=True)
class TokenizeJob:
    """How text becomes tokens: all a worker needs besides its unit."""

    tokenizer: str
    cache_dir: str
    text_key: str = "text"
    append_eos: bool = True


@dataclass(kw_only=True)
class Counts:
    """What has been tokenised."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, other: Counts) -> None:
        self.documents += other.documents
        self.tokens += other.tokens
        self.text_bytes += other.text_bytes
        self.skipped.update(other.skipped)


def named_counts(skipped: Mapping[str, int]) -> str:
    """How many documents were left out for each reason, for people."""
    return ", ".join(f"{count:,} ({reason})" for reason, count in sorted(skipped.items())) or "none"


Progress = Callable[[Counts], None]
"""Called with what was done since the last call."""


def prepare_corpus(
    units: Sequence[Unit],
    job: TokenizeJob,
    prefix: str | Path,
    *,
    plan_key: str,
    workers: int = 1,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> CorpusInfo:
    """Write `PREFIX.bin`, `.idx`, `.meta.json` and `.tokenizer/`.

    Finished units stay in `PREFIX.parts/` until all are merged: a run that was interrupted goes on where it stopped,
    if its `plan_key` (a fingerprint of the source's files) and arguments are still the same. After a fault in the
    input they never are, so nothing stays then.

    Raises:
        ValueError: a fault in the input (`file:line`), no document at all, a tokenizer without an end token, or a
            finished corpus of that prefix that is not to be overwritten, or a place where nothing can be written.
    """
    parts = Path(f"{prefix}.parts")
    if exists(prefix) and not (parts / _MERGING).exists() and not overwrite:
        raise ValueError(f"{prefix}.bin and .idx are there already: choose another --output, or add --overwrite")
    if problem := folder_problem(parts.parent):
        raise ValueError(f"{prefix}.bin and .idx cannot be written, for {problem}: choose another --output")
    tokenizer = load_tokenizer(job.tokenizer, job.cache_dir)
    if job.append_eos and tokenizer.eos_id is None:
        raise ValueError(f"tokenizer {job.tokenizer!r} names no eos_token; add one to its tokenizer_config.json")
    key = cache.fingerprint(plan_key, [asdict(unit) for unit in units], replace(job, cache_dir=""), tokenizer.behaviour)
    with _exclusive(parts):
        _open_parts(parts, key)
        try:
            total = _tokenize_all(units, job, parts, workers, progress)
            if total.documents == 0:
                paths = ", ".join(sorted({unit.path for unit in units}))
                raise ValueError(f"no document with text in {paths}; skipped: {named_counts(total.skipped)}")
        except ValueError:
            _drop(parts)
            if not (parts / _MERGING).exists():
                parts.rmdir()
            raise
        (parts / _MERGING).touch()
        merge([_part_prefix(parts, part) for part in range(len(units))], prefix)
        tokenizer.save(tokenizer_folder(prefix))
        info = replace(
            scan(IndexedDataset(prefix)),
            tokenizer=tokenizer_info(tokenizer),
            text_bytes=total.text_bytes,
            skipped=dict(total.skipped),
        )
        write_info(prefix, info)
        (parts / _MERGING).unlink()
        shutil.rmtree(parts)
    return info


@contextmanager
def _exclusive(parts: Path) -> Iterator[None]:
    """Hold the folder of parts against another preparation of the same prefix; the kernel lets go if we die."""
    parts.mkdir(parents=True, exist_ok=True)
    handle = os.open(parts, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ValueError(f"another process is writing {parts}; wait for it, or choose another output") from None
    finally:
        os.close(handle)


def _tokenize_all(
    units: Sequence[Unit], job: TokenizeJob, parts: Path, workers: int, progress: Progress | None
) -> Counts:
    """Make the parts that are not there yet; counts of all of them."""
    done: list[int] = []
    todo: list[int] = []
    for part in range(len(units)):
        (done if _counts_path(parts, part).is_file() else todo).append(part)
    total = Counts()

    def report(counts: Counts) -> None:
        total.add(counts)
        if progress is not None:
            progress(counts)

    for part in done:
        report(_read_counts(parts, part))
    if workers > 1 and len(todo) > 1:
        _tokenize_parallel(units, todo, job, parts, workers, report)
    else:
        for part in todo:
            report(_tokenize_part(units[part], job, parts, part))
    return total


def _open_parts(parts: Path, key: str) -> None:
    """Keep the finished parts of the same plan, drop those of another."""
    plan = parts / "plan.json"
    if not plan.is_file() or json.loads(plan.read_text(encoding="utf-8")) != {"key": key}:
        _drop(parts)
    cache.write_json(plan, {"key": key})


def _drop(parts: Path) -> None:
    """Remove what was prepared, but not what is known of the prefix's own files."""
    for path in parts.iterdir():
        if path.name != _MERGING:
            path.unlink()


def _part_prefix(parts: Path, part: int) -> Path:
    return parts / f"{part:06d}"


def _counts_path(parts: Path, part: int) -> Path:
    return parts / f"{part:06d}.json"


def _read_counts(parts: Path, part: int) -> Counts:
    stored = json.loads(_counts_path(parts, part).read_text(encoding="utf-8"))
    return Counts(**{**stored, "skipped": Counter(stored["skipped"])})


def _tokenize_parallel(
    units: Sequence[Unit], todo: Sequence[int], job: TokenizeJob, parts: Path, workers: int, report: Progress
) -> None:
    # Spawned, not forked: the parent's tokenizer may hold threads.
    pool = ProcessPoolExecutor(min(workers, len(todo)), mp_context=get_context("spawn"), initializer=_start_worker)
    try:
        pending: set[Future[Counts]] = {pool.submit(_tokenize_part, units[part], job, parts, part) for part in todo}
        while pending:
            finished, pending = wait(pending, timeout=0.5, return_when=FIRST_EXCEPTION)
            for future in finished:
                report(future.result())
    except BrokenProcessPool as error:
        raise RuntimeError("a worker was killed, perhaps for memory; run again with fewer workers to go on") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    # One process per core: threads inside each would only fight.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


@lru_cache(maxsize=1)
def _job_tokenizer(job: TokenizeJob) -> TextTokenizer:
    return load_tokenizer(job.tokenizer, job.cache_dir)


def _tokenize_part(unit: Unit, job: TokenizeJob, parts: Path, part: int) -> Counts:
    """Tokenise a unit into its part; the part's counts are written last and say that it is complete."""
    counts = tokenize_unit(unit, job, _job_tokenizer(job), _part_prefix(parts, part))
    # Not asdict: it would rebuild the Counter from pairs, and count those.
    cache.write_json(_counts_path(parts, part), {**vars(counts), "skipped": dict(counts.skipped)})
    return counts


def tokenize_unit(unit: Unit, job: TokenizeJob, tokenizer: TextTokenizer, prefix: Path) -> Counts:
    """Write one unit's documents as a token file."""
    counts = Counts()
    end = [tokenizer.eos_id] if job.append_eos and tokenizer.eos_id is not None else []
    with IndexedWriter(prefix, dtype_for_vocab(tokenizer.size)) as writer:
        continued = False
        for batch in _batches(read_unit(unit, job.text_key, counts.skipped)):
            for piece, ids in zip(batch, tokenizer.encode([piece.text for piece in batch]), strict=True):
                counts.text_bytes += len(piece.text.encode())
                if not ids and piece.ends_document and not continued:
                    counts.skipped[NO_TOKENS] += 1
                    continue
                continued = not piece.ends_document
                ids = ids if continued else ids + end
                writer.add(ids)
                counts.tokens += len(ids)
                if piece.ends_document:
                    writer.end_document()
                    counts.documents += 1
        writer.finish()
    return counts


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Pieces in batches of bounded text, since a tokenizer's result is much larger than the text."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
