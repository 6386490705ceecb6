"""What a token file holds, for a person to read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hybrid.data.corpus import read_info, scan, tokenizer_folder
from hybrid.data.indexed import IndexedDataset, bin_path
from hybrid.data.tokenizer import TextTokenizer, load_tokenizer

_BAR = 40
_SHOWN_TOKENS = 64


def length_histogram(lengths: NDArray[np.integer]) -> list[tuple[int, int, int]]:
    """(shortest, longest, documents) for lengths of 0, 1, 2-3, 4-7 and so on, up to the longest document."""
    if len(lengths) == 0:
        return []
    top = int(lengths.max()).bit_length()
    edges = [0, *(1 << power for power in range(top + 1))]
    counts, _ = np.histogram(lengths, bins=edges)
    # numpy's last bin includes its right edge, which no length reaches.
    return [(low, high - 1, int(count)) for low, high, count in zip(edges, edges[1:], counts, strict=False)]


def report(prefix: str | Path, samples: int, tokenizer: str | None = None) -> Iterator[str]:
    """Lines of text: counts, a histogram of lengths, and the beginnings of a few documents.

    Raises:
        ValueError: the files are missing or faulty.
    """
    dataset = IndexedDataset(prefix)
    info = read_info(prefix) or scan(dataset)
    size = bin_path(prefix).stat().st_size
    yield f"{prefix}: {info.documents:,} documents, {info.tokens:,} tokens, {dataset.dtype.name}, {size / 1e6:,.1f} MB"
    yield f"token ids {info.smallest_id} to {info.largest_id}, content {info.content}"
    if info.tokenizer is not None:
        made_by = info.tokenizer
        ids = f"{made_by.size:,} ids, end token {made_by.eos_id}, vocabulary {made_by.fingerprint}"
        yield f"tokenizer {made_by.name}: {ids}"
    if info.skipped:
        yield "skipped: " + ", ".join(f"{count:,} ({reason})" for reason, count in sorted(info.skipped.items()))
    yield "document lengths in tokens:"
    histogram = length_histogram(dataset.lengths)
    most = max((count for _, _, count in histogram), default=1)
    for low, high, count in histogram:
        yield f"  {low:>12,} - {high:<12,} {count:>14,} {'#' * -(-count * _BAR // most)}".rstrip()
    yield from _beginnings(dataset, samples, _find_tokenizer(prefix, tokenizer))


def _find_tokenizer(prefix: str | Path, name: str | None) -> TextTokenizer | None:
    stored = tokenizer_folder(prefix)
    if name is None and not stored.is_dir():
        return None
    return load_tokenizer(name or stored, Path(prefix).parent)


def _beginnings(dataset: IndexedDataset, samples: int, tokenizer: TextTokenizer | None) -> Iterator[str]:
    """Documents spread evenly over the file."""
    count = min(samples, len(dataset))
    for document in (len(dataset) * place // count for place in range(count)):
        length = int(dataset.lengths[document])
        ids = dataset.read(document, 0, min(length, _SHOWN_TOKENS)).tolist()
        shown = repr(tokenizer.decode(ids)) if tokenizer is not None else str(ids)
        yield f"document {document} ({length:,} tokens): {shown}{' ...' if length > _SHOWN_TOKENS else ''}"
