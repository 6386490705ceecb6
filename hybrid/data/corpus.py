"""What is known about a token file: its size, the range of its ids, its content's hash, and whose tokenizer made it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from hybrid.data import cache
from hybrid.data.indexed import IndexedDataset, bin_path
from hybrid.data.tokenizer import TextTokenizer

_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """The tokenizer a corpus was made with."""

    name: str
    fingerprint: str
    size: int
    eos_id: int | None


@dataclass(frozen=True, kw_only=True)
class CorpusInfo:
    """Stored beside a token file as `PREFIX.meta.json`."""

    documents: int
    tokens: int
    bin_bytes: int
    """Size of the `.bin` this describes: another size means another file."""
    smallest_id: int
    largest_id: int
    content: str
    """Hash of all ids and document lengths."""
    tokenizer: TokenizerInfo | None = None
    """None for a corpus that another program prepared."""
    text_bytes: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """Documents left out, by reason."""


def meta_path(prefix: str | Path) -> Path:
    """The description of a token file."""
    return Path(f"{prefix}.meta.json")


def tokenizer_folder(prefix: str | Path) -> Path:
    """The tokenizer stored beside a token file."""
    return Path(f"{prefix}.tokenizer")


def tokenizer_info(tokenizer: TextTokenizer) -> TokenizerInfo:
    """What a corpus records about its tokenizer."""
    return TokenizerInfo(
        name=tokenizer.name, fingerprint=tokenizer.fingerprint, size=tokenizer.size, eos_id=tokenizer.eos_id
    )


def scan(dataset: IndexedDataset) -> CorpusInfo:
    """Read a whole token file once, in chunks.

    Raises:
        ValueError: its sequences do not follow one another.
    """
    dataset.check_contiguous()
    digest = hashlib.blake2b(dataset.dtype.str.encode(), digest_size=8)
    smallest, largest = 0, -1
    for chunk in dataset.chunks():
        smallest = min(smallest, int(chunk.min()))
        largest = max(largest, int(chunk.max()))
        digest.update(chunk.tobytes())
    for start in range(0, len(dataset), _CHUNK):
        digest.update(dataset.lengths[start : start + _CHUNK].astype("<i8").tobytes())
    return CorpusInfo(
        documents=len(dataset),
        tokens=dataset.num_tokens,
        bin_bytes=bin_path(dataset.prefix).stat().st_size,
        smallest_id=smallest,
        largest_id=largest,
        content=digest.hexdigest(),
    )


def read_info(prefix: str | Path) -> CorpusInfo | None:
    """The description stored beside a token file, None if there is none or it describes another file."""
    path = meta_path(prefix)
    if not path.is_file():
        return None
    stored = json.loads(path.read_text(encoding="utf-8"))
    tokenizer = stored.pop("tokenizer")
    info = CorpusInfo(**stored, tokenizer=TokenizerInfo(**tokenizer) if tokenizer else None)
    return info if info.bin_bytes == bin_path(prefix).stat().st_size else None


def write_info(prefix: str | Path, info: CorpusInfo) -> None:
    """Store a description beside its token file."""
    cache.write_json(meta_path(prefix), asdict(info))


def corpus_info(dataset: IndexedDataset, cache_dir: Path) -> CorpusInfo:
    """The description of a corpus; one that another program prepared is scanned once and remembered in the cache."""
    info = read_info(dataset.prefix)
    if info is not None:
        return info
    state = bin_path(dataset.prefix).stat()
    key = cache.fingerprint(str(dataset.prefix.resolve()), state.st_size, state.st_mtime_ns)
    remembered = cache_dir / f"scan-{key}" / "tokens"
    if meta_path(remembered).is_file():
        return CorpusInfo(**json.loads(meta_path(remembered).read_text(encoding="utf-8")))
    info = scan(dataset)
    write_info(remembered, info)
    return info


def check_corpus(dataset: IndexedDataset, info: CorpusInfo, vocab_size: int, tokenizer: TextTokenizer | None) -> None:
    """Refuse a corpus that the model or the tokenizer cannot read.

    Raises:
        ValueError: an id has no row in the model, or another tokenizer made the corpus.
    """
    made_by = info.tokenizer
    if made_by is not None and tokenizer is not None and made_by.fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"{dataset.prefix} was prepared with tokenizer {made_by.name!r} ({made_by.size} ids, vocabulary "
            f"{made_by.fingerprint}), but this run's tokenizer {tokenizer.name!r} has {tokenizer.size} ids and "
            f"vocabulary {tokenizer.fingerprint}: use {tokenizer_folder(dataset.prefix)} or prepare the text again"
        )
    if made_by is not None and made_by.size > vocab_size:
        raise ValueError(
            f"{dataset.prefix} was prepared with a tokenizer of {made_by.size} ids, but the model's vocab_size is "
            f"{vocab_size}: set vocab_size to at least {made_by.size}, or prepare the text with the model's tokenizer"
        )
    if info.smallest_id >= 0 and info.largest_id < vocab_size:
        return
    document, token = _first_outside(dataset, vocab_size)
    raise ValueError(
        f"{dataset.prefix}: document {document} holds token id {token}, outside the model's [0, {vocab_size}): "
        "prepare the text with the model's tokenizer, or set the model's vocab_size"
    )


def _first_outside(dataset: IndexedDataset, vocab_size: int) -> tuple[int, int]:
    start = 0
    for chunk in dataset.chunks():
        outside = np.flatnonzero((chunk < 0) | (chunk >= vocab_size))
        if outside.size:
            ends = np.cumsum(dataset.lengths, dtype=np.int64)
            position = start + int(outside[0])
            return int(np.searchsorted(ends, position, side="right")), int(chunk[outside[0]])
        start += len(chunk)
    raise AssertionError("the description names an id that the file does not hold")
