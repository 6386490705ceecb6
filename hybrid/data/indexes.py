"""The order of an epoch: document, sample and shuffle indexes as in Megatron's GPT dataset, built with numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hybrid.config.errors import counted
from hybrid.data.cache import cached_array

Ints = NDArray[np.integer]


class Stream(IntEnum):
    """What a random order is for; each has its own stream of the seed."""

    SPLIT = 0
    DOCUMENTS = 1
    SAMPLES = 2


@dataclass(frozen=True)
class EpochIndex:
    """Where the samples of one epoch lie."""

    documents: Ints
    """Document numbers in this epoch's order."""
    first_document: Ints
    """Place in `documents` where each sample begins."""
    first_offset: Ints
    """Token of that document where each sample begins."""
    order: Ints
    """Which sample is served at each place of the epoch."""


def permutation(size: int, seed: int, epoch: int, stream: Stream) -> NDArray[np.int64]:
    """A random order that depends on the arguments only.

    numpy promises that `RandomState`, unlike `Generator`, gives the same numbers in every version.
    """
    return np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32, epoch, stream]).permutation(size)


def num_samples(num_tokens: int, seq_length: int) -> int:
    """Samples that `num_tokens` are cut into: each token but the first is the target of exactly one."""
    return max(0, -(-(num_tokens - 1) // seq_length))


def build_epoch_index(
    lengths: Ints, documents: Ints, seq_length: int, order_of: tuple[int, int] | None
) -> NDArray[np.integer]:
    """The four arrays of an `EpochIndex`, one after the other.

    Args:
        lengths: tokens of every document of the corpus.
        documents: the documents of this set.
        order_of: (seed, epoch) of the shuffles; None leaves documents and samples in their own order.
    """
    total = int(lengths[documents].sum(dtype=np.int64))
    count = num_samples(total, seq_length)
    shuffled = documents if order_of is None else documents[permutation(len(documents), *order_of, Stream.DOCUMENTS)]
    ends = np.cumsum(lengths[shuffled], dtype=np.int64)
    starts = np.arange(count, dtype=np.int64) * seq_length
    # "right" steps over empty documents, whose end is their neighbour's.
    first = np.searchsorted(ends, starts, side="right")
    offset = starts - (ends[first] - lengths[shuffled[first]])
    order = np.arange(count) if order_of is None else permutation(count, *order_of, Stream.SAMPLES)
    largest = max(int(lengths.max(initial=0)), len(lengths), count)
    dtype = np.int32 if largest < 2**31 else np.int64
    return np.concatenate([part.astype(dtype, copy=False) for part in (shuffled, first, offset, order)])


def open_epoch_index(packed: NDArray[np.integer], num_documents: int) -> EpochIndex:
    """Views of the arrays that `build_epoch_index` made."""
    count = (len(packed) - num_documents) // 3
    cuts = [num_documents + count * part for part in range(4)]
    return EpochIndex(packed[: cuts[0]], *(packed[a:b] for a, b in zip(cuts, cuts[1:], strict=False)))


def split_documents(
    num_documents: int, fractions: Sequence[float], cache_dir: Path | None, name: str
) -> list[NDArray[np.integer]]:
    """Documents of the training set and of one held-out set per fraction, each document in exactly one.

    The choice is random but depends on the number of documents only, not on the run's seed: no seed leaks a document
    that another held out. Each fraction above 0 gets at least one document, and so does training.

    Raises:
        ValueError: the fractions leave nothing to train on, or there are fewer documents than sets.
    """
    if any(not 0 <= fraction < 1 for fraction in fractions) or sum(fractions) >= 1:
        raise ValueError(f"held-out fractions {list(fractions)} must each be in [0, 1) and leave something to train on")
    held_out = [max(1, round(num_documents * fraction)) if fraction else 0 for fraction in fractions]
    if num_documents - sum(held_out) < 1:
        raise ValueError(
            f"{name} has {counted(num_documents, 'document')}, too few for a training set and held-out sets of "
            f"{held_out}: give more documents, or set hybrid.data.eval_fraction and hybrid.data.test_fraction to 0"
        )
    if not any(held_out):
        return [np.arange(num_documents), *(np.zeros(0, np.int64) for _ in held_out)]
    cuts = np.cumsum([num_documents - sum(held_out), *held_out])[:-1]

    def build() -> NDArray[np.integer]:
        shuffled = permutation(num_documents, 0, 0, Stream.SPLIT)
        parts = [np.sort(part) for part in np.split(shuffled, cuts)]
        return np.concatenate(parts).astype(np.int32 if num_documents < 2**31 else np.int64)

    key = f"split-{num_documents}-{'-'.join(map(str, held_out))}"
    return np.split(cached_array(cache_dir, key, build), cuts)
