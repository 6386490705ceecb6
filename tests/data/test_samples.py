"""Samples: exact coverage, purity, label shift, document boundaries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.data.indexes import build_epoch_index, split_documents
from hybrid.data.samples import IGNORE_INDEX, CutDocument, GPTDataset, SampleSource

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=20).filter(lambda lengths: sum(lengths) >= 2)


class ListCorpus:
    """Documents held in memory; each token names its place, so any loss or repeat shows."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = np.array(lengths)
        ends = np.cumsum([0, *lengths])
        self.documents = [np.arange(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]

    def read(self, document: int, offset: int, length: int) -> np.ndarray:
        assert 0 <= offset and offset + length <= len(self.documents[document])
        return self.documents[document][offset : offset + length]


def dataset_of(lengths: list[int], seq_length: int, seed: int | None = 0, reset: bool = False) -> GPTDataset:
    corpus = ListCorpus(lengths)
    documents = np.arange(len(lengths))
    return GPTDataset(corpus, documents, seq_length=seq_length, seed=seed, reset_attention=reset, pad_id=999_999)


@settings(max_examples=80, deadline=None)
@given(lengths=LENGTHS, seq_length=st.integers(1, 9), seed=st.integers(0, 2**40), epoch=st.integers(0, 3))
def test_an_epoch_covers_every_token_once(lengths: list[int], seq_length: int, seed: int, epoch: int) -> None:
    dataset = dataset_of(lengths, seq_length, seed)
    total = sum(lengths)
    assert len(dataset) == -(-(total - 1) // seq_length)
    inputs, targets = [], []
    for index in range(len(dataset)):
        tokens, labels = dataset.sample(epoch, index)
        assert tokens.shape == labels.shape == (seq_length,) and tokens.dtype == labels.dtype == np.int64
        inputs.extend(tokens[tokens != 999_999])
        targets.extend(labels[labels != IGNORE_INDEX])
        # The label of a token is its successor in the same sample.
        supervised = labels[:-1] != IGNORE_INDEX
        assert (labels[:-1] == tokens[1:])[supervised].all()
    # As targets: all but the epoch's first token. As inputs: all, but the last where nothing follows it in its sample.
    assert len(targets) == len(set(targets)) == total - 1
    assert len(inputs) == len(set(inputs)) >= total - 1


def test_samples_overlap_by_one_token_and_order_can_be_kept() -> None:
    dataset = dataset_of([5, 0, 4], 3, seed=None)
    samples = [dataset.sample(0, index) for index in range(3)]
    assert [tokens.tolist() for tokens, _ in samples] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [labels.tolist() for _, labels in samples] == [[1, 2, 3], [4, 5, 6], [7, 8, IGNORE_INDEX]]


def test_a_sample_is_a_function_of_seed_epoch_and_index() -> None:
    lengths = [7, 3, 9, 4, 11]

    def epoch(seed: int, number: int) -> list[list[int]]:
        dataset = dataset_of(lengths, 4, seed)
        return [dataset.sample(number, index)[0].tolist() for index in range(len(dataset))]

    assert epoch(1, 0) == epoch(1, 0)
    assert epoch(1, 0) != epoch(1, 1)
    assert epoch(1, 0) != epoch(2, 0)
    dataset = dataset_of(lengths, 4, 1)
    positions = [5, 30, 0, 12, 5]
    assert [dataset.read(at)[0].tolist() for at in positions] == [
        dataset.sample(at // len(dataset), at % len(dataset))[0].tolist() for at in positions
    ]


@pytest.mark.parametrize("lengths", [[3], [2, 3], [5, 3]])
def test_documents_shorter_than_a_sample_have_a_fixed_shape(lengths: list[int]) -> None:
    dataset = dataset_of(lengths, 8)
    tokens, labels = dataset.sample(0, 0)
    assert tokens.shape == labels.shape == (8,)
    assert (labels != IGNORE_INDEX).sum() == sum(lengths) - 1


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="^2 documents with 1 token, and a sample needs at least 2 tokens$"):
        dataset_of([1, 0], 4)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, seq_length=st.integers(1, 9), seed=st.integers(0, 99))
def test_reset_attention_marks_documents(lengths: list[int], seq_length: int, seed: int) -> None:
    plain, packed = dataset_of(lengths, seq_length, seed), dataset_of(lengths, seq_length, seed, reset=True)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    for index in range(len(plain)):
        tokens, labels, positions, segments = packed.sample(0, index)
        assert (tokens == plain.sample(0, index)[0]).all()
        real = tokens != 999_999
        for t in np.flatnonzero(real):
            if labels[t] != IGNORE_INDEX:
                assert owner[labels[t]] == owner[tokens[t]] and labels[t] == tokens[t] + 1
        for t in range(1, seq_length):
            same = real[t] and owner[tokens[t]] == owner[tokens[t - 1]] or (not real[t] and not real[t - 1])
            assert (segments[t] == segments[t - 1]) == bool(same)
            assert positions[t] == (positions[t - 1] + 1 if same else 0)
        assert segments[0] == positions[0] == 0
        # Only boundaries lose their label.
        lost = (labels == IGNORE_INDEX) & (plain.sample(0, index)[1] != IGNORE_INDEX)
        assert all(owner[plain.sample(0, index)[1][t]] != owner[tokens[t]] for t in np.flatnonzero(lost))


def test_blank_has_the_shape_of_a_sample() -> None:
    for reset in (False, True):
        dataset: SampleSource = dataset_of([9], 4, reset=reset)
        sample, blank = dataset.read(0), dataset.blank()
        assert [(a.shape, a.dtype) for a in sample] == [(a.shape, a.dtype) for a in blank]
        assert (blank[1] == IGNORE_INDEX).all()


def test_large_indexes_are_written_once_and_mapped(tmp_path: Path) -> None:
    lengths = [3] * 200_000
    corpus, documents = ListCorpus([3]), np.arange(len(lengths))
    corpus.lengths = np.array(lengths)

    def make() -> GPTDataset:
        return GPTDataset(corpus, documents, seq_length=8, seed=3, cache_dir=tmp_path, content="x")

    first = make()._build_index(2)
    (path,) = tmp_path.iterdir()
    written = path.stat().st_mtime_ns
    second = make()._build_index(2)
    assert path.stat().st_mtime_ns == written
    for name in ("documents", "first_document", "first_offset", "order"):
        assert np.array_equal(getattr(first, name), getattr(second, name))
        assert isinstance(getattr(second, name), np.memmap)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(3, 400),
    fractions=st.tuples(st.sampled_from([0.0, 0.01, 0.1, 0.3]), st.sampled_from([0.0, 0.2, 0.4])),
)
def test_every_document_is_in_exactly_one_split(count: int, fractions: tuple[float, float]) -> None:
    parts = split_documents(count, fractions, None, "c")
    assert sorted(np.concatenate(parts).tolist()) == list(range(count))
    assert len(parts[0]) >= 1
    for part, fraction in zip(parts[1:], fractions, strict=True):
        assert len(part) == (max(1, round(count * fraction)) if fraction else 0)


@pytest.mark.parametrize(
    ("count", "fractions", "message"), [(1, (0.1, 0.1), "too few"), (9, (0.5, 0.5), "in \\[0, 1\\)")]
)
def test_impossible_splits_are_errors(count: int, fractions: tuple[float, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_documents(count, fractions, None, "c")


def test_one_document_is_seen_as_several() -> None:
    parts = CutDocument(ListCorpus([10]), [0, 7, 9])
    assert parts.lengths.tolist() == [7, 2, 1]
    assert parts.read(0, 2, 5).tolist() == [2, 3, 4, 5, 6]
    assert parts.read(1, 1, 1).tolist() == [8]
    assert parts.read(2, 0, 1).tolist() == [9]


def test_empty_documents_are_stepped_over() -> None:
    packed = build_epoch_index(np.array([0, 3, 0, 0, 4, 0]), np.arange(6), 3, None)
    assert packed.tolist() == [0, 1, 2, 3, 4, 5, 1, 4, 0, 0, 0, 1]
