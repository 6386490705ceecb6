"""Token documents to training samples: an epoch's documents end to end, cut every `seq_length` tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hybrid.config.errors import counted
from hybrid.data.cache import cached_array, fingerprint, worth_a_file
from hybrid.data.indexes import EpochIndex, build_epoch_index, num_samples, open_epoch_index
from hybrid.tensor_parallel.cross_entropy import IGNORE_INDEX

Sample = tuple[NDArray[np.int64], ...]
"""(tokens, labels), or (tokens, labels, position_ids, segment_ids), each `[seq_length]`; see `GPTDataset`."""


class Corpus(Protocol):
    """Numbered documents of token ids."""

    @property
    def lengths(self) -> NDArray[np.integer]:
        """Tokens of each document."""

    def read(self, document: int, offset: int, length: int) -> NDArray[np.integer]:
        """`length` tokens of a document from `offset` on."""


class SampleSource(Protocol):
    """An endless sequence of samples of one shape; the same position always gives the same sample."""

    def __len__(self) -> int:
        """Samples in one pass over the data."""

    def read(self, position: int) -> Sample:
        """The sample at a position, counted from the start of training."""

    def blank(self) -> Sample:
        """A sample of the same shape with nothing supervised."""


class CutDocument:
    """A corpus of one document, seen as several: those that begin at `starts`, of which the first is 0."""

    def __init__(self, corpus: Corpus, starts: Sequence[int]) -> None:
        self._corpus = corpus
        self._starts = tuple(starts)
        self.lengths: NDArray[np.integer] = np.diff([*starts, int(corpus.lengths[0])])

    def read(self, document: int, offset: int, length: int) -> NDArray[np.integer]:
        return self._corpus.read(0, self._starts[document] + offset, length)


class GPTDataset:
    """Samples of `seq_length` tokens and their labels, as in Megatron's GPT dataset.

    Every epoch shuffles the documents, lays them end to end, cuts the result every `seq_length` tokens and shuffles
    the samples. Sample k holds tokens `[k*S, (k+1)*S)` of that sequence and the labels `[k*S+1, (k+1)*S+1)`, so each
    token of an epoch is an input once and, but for the epoch's first, a target once. The last sample of an epoch is
    filled up with `pad_id`, unsupervised; no token is dropped or carried into another epoch.

    With `reset_attention`, a sample also has `position_ids`, which start again at 0 with every document, and
    `segment_ids`, which number the documents of the sample 0, 1, ...: a token may attend to its own segment only.
    A document's last token then has no label, and the filling is a segment of its own.
    """

    def __init__(
        self,
        corpus: Corpus,
        documents: NDArray[np.integer],
        *,
        seq_length: int,
        seed: int | None,
        reset_attention: bool = False,
        pad_id: int = 0,
        cache_dir: Path | None = None,
        content: str = "",
    ) -> None:
        """
        Args:
            documents: the corpus's documents that belong to this set.
            seed: of the shuffles; None keeps documents and samples in order, every epoch.
            cache_dir: where large indexes are kept; None keeps them in memory.
            content: fingerprint of the corpus, which the cached indexes are keyed by.

        Raises:
            ValueError: the documents hold fewer than two tokens: there is nothing to predict.
        """
        self._corpus = corpus
        self._documents = documents
        self.seq_length = seq_length
        self._seed = seed
        self._reset_attention = reset_attention
        self._pad_id = pad_id
        self._cache_dir = cache_dir
        self.num_tokens = int(corpus.lengths[documents].sum(dtype=np.int64))
        self._key = fingerprint(content, seq_length, seed, self.num_tokens, _bounds(documents))
        self._samples = num_samples(self.num_tokens, seq_length)
        if self._samples == 0:
            raise ValueError(
                f"{counted(len(documents), 'document')} with {counted(self.num_tokens, 'token')}, "
                "and a sample needs at least 2 tokens"
            )
        # A batch may span two epochs.
        self._index = lru_cache(maxsize=2)(self._build_index)

    def __len__(self) -> int:
        """Samples of an epoch."""
        return self._samples

    def read(self, position: int) -> Sample:
        """The sample at a position counted over all epochs."""
        return self.sample(*divmod(position, self._samples))

    def sample(self, epoch: int, index: int) -> Sample:
        """The sample served at place `index` of an epoch: a function of (seed, epoch, index) only."""
        epoch_index = self._index(0 if self._seed is None else epoch)
        pieces = self._pieces(epoch_index, int(epoch_index.order[index]))
        tokens, labels = self.blank()[:2]
        found = np.concatenate(pieces)
        tokens[: len(found)] = found[: self.seq_length]
        labels[: len(found) - 1] = found[1:]
        if not self._reset_attention:
            return tokens, labels
        starts = np.cumsum([0, *map(len, pieces)])
        # Where a document starts, the position before it would predict across the boundary.
        labels[starts[1:-1] - 1] = IGNORE_INDEX
        return tokens, labels, *segments(starts, self.seq_length)

    def blank(self) -> Sample:
        """A sample of filling: nothing supervised."""
        tokens = np.full(self.seq_length, self._pad_id, dtype=np.int64)
        labels = np.full(self.seq_length, IGNORE_INDEX, dtype=np.int64)
        if not self._reset_attention:
            return tokens, labels
        return tokens, labels, *segments(np.zeros(1, np.int64), self.seq_length)

    def build(self, samples: int) -> None:
        """Put the indexes that the first `samples` samples need into the cache, if they are large enough to be kept."""
        entries = len(self._documents) + 3 * self._samples
        if self._cache_dir is None or not worth_a_file(entries * np.dtype(np.int32).itemsize):
            return
        epochs = 1 if self._seed is None else -(-samples // self._samples)
        for epoch in range(epochs):
            self._build_index(epoch)

    def _build_index(self, epoch: int) -> EpochIndex:
        def build() -> NDArray[np.integer]:
            order_of = None if self._seed is None else (self._seed, epoch)
            return build_epoch_index(self._corpus.lengths, self._documents, self.seq_length, order_of)

        packed = cached_array(self._cache_dir, f"index-{self._key}-{epoch}", build)
        return open_epoch_index(packed, len(self._documents))

    def _pieces(self, index: EpochIndex, sample: int) -> list[NDArray[np.integer]]:
        """The `seq_length + 1` tokens of a sample (fewer at the epoch's end), one piece per document."""
        place, offset = int(index.first_document[sample]), int(index.first_offset[sample])
        pieces, wanted = [], self.seq_length + 1
        while wanted and place < len(index.documents):
            document = int(index.documents[place])
            length = min(int(self._corpus.lengths[document]) - offset, wanted)
            if length:
                pieces.append(self._corpus.read(document, offset, length))
            wanted -= length
            place, offset = place + 1, 0
        return pieces


def segments(starts: NDArray[np.integer], seq_length: int) -> Sample:
    """(position_ids, segment_ids) of a sample whose documents start at `starts`; each start opens a segment."""
    within = np.unique(starts[starts < seq_length])
    places = np.arange(seq_length, dtype=np.int64)
    segment_ids = np.searchsorted(within, places, side="right") - 1
    return places - within[segment_ids], segment_ids.astype(np.int64)


def _bounds(documents: NDArray[np.integer]) -> list[int]:
    """Enough to tell one split of a corpus from another of the same size."""
    if len(documents) == 0:
        return []
    return [len(documents), int(documents[0]), int(documents[-1]), int(documents.sum(dtype=np.int64))]
