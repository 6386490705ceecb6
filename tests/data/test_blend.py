"""Blends: proportions exact to one sample at every length, every source through its own epochs."""

from __future__ import annotations

import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.data import blend
from hybrid.data.blend import BlendedDataset, Schedule, integer_weights
from hybrid.data.samples import Sample


class Named:
    """Samples that say their source and position."""

    def __init__(self, name: int, size: int) -> None:
        self.name, self.size = name, size

    def __len__(self) -> int:
        return self.size

    def read(self, position: int) -> Sample:
        return np.array([self.name]), np.array([position])

    def blank(self) -> Sample:
        return np.array([-1]), np.array([-1])


WEIGHTS = st.lists(
    st.fractions(Fraction(1, 1000), 100, max_denominator=1000) | st.integers(1, 10**6).map(Fraction),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, length=st.integers(1, 400))
def test_proportions_are_exact_to_one_sample_at_every_length(weights: list[Fraction], length: int) -> None:
    whole = integer_weights(weights)
    schedule, total = Schedule(whole), sum(whole)
    counts = [0] * len(weights)
    for place in range(length):
        source, number = schedule(place)
        assert number == counts[source]
        counts[source] += 1
        # |count - share * (place + 1)| < 1, in integers.
        assert all(abs(count * total - w * (place + 1)) < total for count, w in zip(counts, whole, strict=True))


@pytest.mark.parametrize("weights", [[1], [1, 1], [1, 2, 5], [50, *[1] * 50], [999_983, 17]])
def test_far_places_need_no_table(weights: list[int]) -> None:
    schedule = Schedule(weights)
    period = sum(weights)
    for place in (0, 1, period - 1 if period < 1000 else 999):
        source, number = schedule(place)
        assert schedule(place + 10**9 * period) == (source, number + 10**9 * weights[source])


def test_the_order_does_not_depend_on_how_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Schedule([3, 7, 11])
    expected = [forward(place) for place in range(100)]
    monkeypatch.setattr(blend, "_CHUNK", 5)
    backward = Schedule([3, 7, 11])
    assert [backward(place) for place in range(99, -1, -1)] == expected[::-1]


def test_by_size_serves_every_sample_once() -> None:
    sources = [Named(0, 7), Named(1, 1), Named(2, 30)]
    blended = BlendedDataset.by_size(sources)
    seen = {tuple(int(a[0]) for a in blended.read(place)) for place in range(len(blended))}
    assert seen == {(source.name, position) for source in sources for position in range(source.size)}


def test_weights_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"\[1.0, 0.0\] must all be above 0"):
        BlendedDataset([Named(0, 1), Named(1, 1)], [Fraction(1), Fraction(0)])


def test_a_million_places_take_seconds() -> None:
    schedule = Schedule([123_457, 456_789, 419_754])
    start = time.perf_counter()
    schedule(999_999)
    assert time.perf_counter() - start < 30
