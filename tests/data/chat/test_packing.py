"""Best-fit packing: every sample once, no row too full, few rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.data.chat.packing import best_fit, one_each


@given(st.integers(1, 40).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=60))))
def test_every_sample_lies_in_one_row(case: tuple[int, list[int]]) -> None:
    capacity, lengths = case
    packs = best_fit(lengths, capacity)
    rows = [packs.row(index).tolist() for index in range(len(packs))]
    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[sample] for sample in row) <= capacity for row in rows)
    # At most one row can be half empty or less.
    assert sum(2 * sum(lengths[sample] for sample in row) <= capacity for row in rows) <= 1


def test_the_fullest_row_that_fits() -> None:
    packs = best_fit([6, 3, 7, 4, 2], 10)
    assert [packs.row(index).tolist() for index in range(len(packs))] == [[2, 1], [0, 3], [4]]


def test_a_sample_that_is_too_long() -> None:
    with pytest.raises(ValueError, match="11 tokens does not fit a row of 10"):
        best_fit([3, 11], 10)


def test_one_each() -> None:
    packs = one_each(3)
    assert [packs.row(index).tolist() for index in range(3)] == [[0], [1], [2]]
