"""Conversations as the samples a run reads: packed into rows, or one in each."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hybrid.data.chat.packing import Packs
from hybrid.data.chat.prepare import ChatCorpus
from hybrid.data.samples import Sample, segments
from hybrid.tensor_parallel.cross_entropy import IGNORE_INDEX


class ChatDataset:
    """Rows of `seq_length` tokens and their labels, shuffled anew in every epoch.

    A packed row holds whole samples, one after the other, and says so with positions that start anew and with segment
    numbers: a token sees its own sample only, and nothing is predicted across samples. Filling is a segment of its
    own. Without packing a row is one sample, filled up on the right, where no token sees it.
    """

    def __init__(
        self, corpus: ChatCorpus, packs: Packs, *, seq_length: int, seed: int | None, packed: bool, pad_id: int
    ) -> None:
        """
        Args:
            packs: the samples of each row.
            seed: of the order of rows; None keeps it, every epoch.
            packed: rows say where samples start.
        """
        self.corpus, self.packs = corpus, packs
        self.seq_length = seq_length
        self._seed = seed
        self._packed = packed
        self._pad_id = pad_id
        # A batch may span two epochs.
        self._order = lru_cache(maxsize=2)(self._make_order)

    def __len__(self) -> int:
        """Rows of an epoch."""
        return len(self.packs)

    def _make_order(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self._seed or 0, epoch]).permutation(len(self.packs))

    def read(self, position: int) -> Sample:
        """The row at a position counted over all epochs."""
        epoch, index = divmod(position, len(self.packs))
        return self.row(index if self._seed is None else int(self._order(epoch)[index]))

    def row(self, index: int) -> Sample:
        """Row `index` in the order of `packs`."""
        tokens, labels = self._filling()
        starts, end = [], 0
        for member in self.packs.row(index):
            ids, supervised = self.corpus.sample(int(member))
            tokens[end : end + len(ids)] = ids
            # The label of a position is the next token, if the model is to learn that one.
            labels[end : end + len(ids) - 1] = np.where(supervised[1:], ids[1:], IGNORE_INDEX)
            starts.append(end)
            end += len(ids)
        return (tokens, labels, *segments(np.array([*starts, end]), self.seq_length)) if self._packed else (
            tokens, labels
        )  # fmt: skip

    def blank(self) -> Sample:
        """A row of filling: nothing supervised."""
        tokens, labels = self._filling()
        return (tokens, labels, *segments(np.zeros(1, np.int64), self.seq_length)) if self._packed else (tokens, labels)

    def _filling(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        tokens = np.full(self.seq_length, self._pad_id, dtype=np.int64)
        return tokens, np.full(self.seq_length, IGNORE_INDEX, dtype=np.int64)
