"""What a person is shown of a token file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from hybrid.data.indexed import IndexedWriter
from hybrid.data.inspection import length_histogram, report


def test_the_histogram_counts_every_document_once() -> None:
    lengths = np.array([0, 0, 1, 2, 3, 4, 7, 8, 1024])
    histogram = length_histogram(lengths)
    assert histogram[:5] == [(0, 0, 2), (1, 1, 1), (2, 3, 2), (4, 7, 2), (8, 15, 1)]
    assert histogram[-1] == (1024, 2047, 1)
    assert sum(count for _, _, count in histogram) == len(lengths)
    assert length_histogram(np.array([0])) == [(0, 0, 1)]
    assert length_histogram(np.array([], dtype=np.int32)) == []


def test_a_foreign_file_is_shown_as_ids_or_decoded(tmp_path: Path, word_tokenizer: Callable[..., Path]) -> None:
    with IndexedWriter(tmp_path / "c", np.dtype(np.int32)) as writer:
        for row in ([3, 4], [], [5]):
            writer.add(row)
            writer.end_document()
        writer.finish()
    lines = list(report(tmp_path / "c", 3))
    assert "3 documents, 3 tokens, int32" in lines[0]
    assert "document 0 (2 tokens): [3, 4]" in lines
    decoded = list(report(tmp_path / "c", 1, str(word_tokenizer(tmp_path / "t", 9))))
    assert decoded[-1] == "document 0 (2 tokens): 'w3 w4'"
