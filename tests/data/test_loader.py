"""Microbatches: the same samples under every layout, exactly once, resumable anywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.data.loader import Batch, BatchLoader, EvalLoader
from hybrid.data.prefetch import Prefetcher
from hybrid.data.samples import IGNORE_INDEX, Sample


class Ids:
    """`size` samples, shuffled anew each epoch; the tokens of a sample are its id."""

    def __init__(self, size: int, broken: int | None = None) -> None:
        self.size = size
        self.broken = broken

    def __len__(self) -> int:
        return self.size

    def read(self, position: int) -> Sample:
        if position == self.broken:
            raise OSError("the disk is gone")
        epoch, index = divmod(position, self.size)
        number = int(np.random.RandomState(epoch).permutation(self.size)[index])
        return np.full(3, number), np.full(3, number)

    def blank(self) -> Sample:
        return np.zeros(3, np.int64), np.full(3, IGNORE_INDEX)


def step(loaders: list[BatchLoader], gas: int) -> list[int]:
    """The sample ids of one global step over all ranks."""
    return [int(row[0]) for _ in range(gas) for loader in loaders for row in next(loader)[0]]


def ranks(source: Ids, mbs: int, gas: int, dp: int, start: int = 0, prefetch: int | None = 0) -> list[BatchLoader]:
    return [
        BatchLoader(
            source,
            micro_batch_size=mbs,
            gradient_accumulation_steps=gas,
            dp_rank=rank,
            dp_size=dp,
            samples_consumed=start,
            prefetch=prefetch,
        )
        for rank in range(dp)
    ]


LAYOUT = st.sampled_from([(1, 1, 12), (1, 12, 1), (2, 3, 2), (3, 2, 2), (4, 1, 3), (6, 2, 1), (2, 2, 3), (1, 4, 3)])
"""(micro batch, accumulation, ranks) of a global batch of 12."""


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 50), legs=st.lists(st.tuples(LAYOUT, st.integers(1, 4)), min_size=1, max_size=4))
def test_resuming_under_any_layout_continues_the_sequence(
    size: int, legs: list[tuple[tuple[int, int, int], int]]
) -> None:
    source = Ids(size)
    consumed = 0
    for (mbs, gas, dp), steps in legs:
        loaders = ranks(source, mbs, gas, dp, consumed)
        for _ in range(steps):
            expected = [int(source.read(at)[0][0]) for at in range(consumed, consumed + 12)]
            assert step(loaders, gas) == expected
            consumed += 12
        assert all(loader.state() == {"samples_consumed": consumed} for loader in loaders)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("stop", [3, 7])
def test_exactly_once_over_a_restart_in_mid_epoch(prefetch: int, stop: int) -> None:
    """20 ids on 2 ranks, 4 a step, stopped in the middle of epoch 0 and of epoch 1."""
    source = Ids(20)
    whole = ranks(source, 1, 2, 2)
    uninterrupted = [step(whole, 2) for _ in range(10)]
    first = ranks(source, 1, 2, 2, prefetch=prefetch)
    before = [step(first, 2) for _ in range(stop)]
    state = first[0].state()
    for loader in first:
        loader.close()
    second = ranks(source, 1, 2, 2, state["samples_consumed"], prefetch)
    after = [step(second, 2) for _ in range(10 - stop)]
    for loader in second:
        loader.close()
    assert before + after == uninterrupted
    ids = [number for one in before + after for number in one]
    assert sorted(ids[:20]) == sorted(ids[20:]) == list(range(20))


@pytest.mark.parametrize(("size", "mbs", "dp"), [(5, 2, 2), (3, 4, 2), (1, 1, 4)])
def test_training_goes_on_into_the_next_epoch(size: int, mbs: int, dp: int) -> None:
    """The tail of an epoch that does not fill a batch, and an epoch shorter than one batch: no end, equal counts."""
    loaders = ranks(Ids(size), mbs, 1, dp)
    ids = [number for _ in range(2 * size) for number in step(loaders, 1)]
    assert len(ids) == 2 * size * mbs * dp
    for epoch in range(len(ids) // size):
        assert sorted(ids[epoch * size : (epoch + 1) * size]) == list(range(size))


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 40),
    mbs=st.integers(1, 5),
    dp=st.integers(1, 4),
    multiple=st.integers(1, 3),
    limit=st.none() | st.integers(1, 50),
)
def test_evaluation_counts_each_sample_once(size: int, mbs: int, dp: int, multiple: int, limit: int | None) -> None:
    loaders = [
        EvalLoader(Ids(size), micro_batch_size=mbs, dp_rank=r, dp_size=dp, max_samples=limit, multiple_of=multiple)
        for r in range(dp)
    ]
    passes = [list(loader) for loader in loaders]
    assert {len(batches) for batches in passes} == {len(loaders[0])}
    assert len(loaders[0]) % multiple == 0
    rows = [row for batches in passes for batch in batches for row in batch[1]]
    assert all(batch[0].shape == (mbs, 3) for batches in passes for batch in batches)
    seen = sorted(int(row[0]) for row in rows if row[0] != IGNORE_INDEX)
    expected = [int(Ids(size).read(at)[0][0]) for at in range(min(size, limit or size))]
    assert seen == sorted(expected)
    assert [batch[0].tolist() for batch in loaders[0]] == [batch[0].tolist() for batch in passes[0]]


def test_tensors_have_the_documented_form() -> None:
    (loader,) = ranks(Ids(9), 4, 1, 1)
    batch: Batch = next(loader)
    assert [(t.dtype, tuple(t.shape)) for t in batch] == [(torch.int64, (4, 3))] * 2


def test_a_fault_of_the_reading_thread_reaches_the_consumer() -> None:
    (loader,) = ranks(Ids(9, broken=5), 2, 1, 1, prefetch=3)
    next(loader), next(loader)
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            next(loader)
    assert loader.samples_consumed == 4
    loader.close()


def test_the_thread_is_bounded_and_ends() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(1000):
            made.append(number)
            yield number

    prefetcher = Prefetcher(items(), 3)
    assert next(prefetcher) == 0
    time.sleep(0.3)
    assert len(made) <= 1 + 3 + 1
    prefetcher.close()
    prefetcher.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(prefetcher)
    assert list(Prefetcher(iter([1, 2]), 1)) == [1, 2]


def test_a_dropped_loader_ends_its_thread() -> None:
    before = threading.active_count()
    loader = ranks(Ids(9), 2, 1, 1, prefetch=2)
    next(loader[0])
    del loader
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() == before


def test_sizes_out_of_range_are_errors() -> None:
    with pytest.raises(ValueError, match="rank 2 in"):
        BatchLoader(Ids(3), micro_batch_size=1, gradient_accumulation_steps=1, dp_rank=2, dp_size=2)
    with pytest.raises(ValueError, match="samples_consumed is -1"):
        ranks(Ids(3), 1, 1, 1, start=-1)
