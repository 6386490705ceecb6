"""Several sample sources mixed in given proportions, exact to one sample at every length."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction
from math import gcd

import numpy as np
from numpy.typing import NDArray

from hybrid.data.samples import Sample, SampleSource

_CHUNK = 1 << 16


class Schedule:
    """Which source each sample comes from.

    After n samples, a source of share w has given floor(n*w) or ceil(n*w) of them, for every n. Sample j (from 0) of
    that source must then lie in places `[floor(j/w), ceil((j+1)/w))`. Taking at each place the admissible sample whose
    last place comes first always succeeds: it is the scheduling of unit jobs by earliest deadline (Baruah, Cohen,
    Plaxton and Varvel 1996, "Proportionate progress"). The order repeats after sum(weights) places.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        """
        Args:
            weights: positive integers, whose ratios count.
        """
        common = gcd(*weights)
        self._weights = [weight // common for weight in weights]
        self._period = sum(self._weights)
        self._sources: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._numbers: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._given = [0] * len(weights)
        self._ready: list[tuple[int, int]] = []
        self._waiting: list[tuple[int, int]] = []
        for source in range(len(weights)):
            self._release(source)

    def __call__(self, place: int) -> tuple[int, int]:
        """(source, how many samples of it came before) at a place."""
        rounds, within = divmod(place, self._period)
        while within >= len(self._sources):
            self._extend()
        source = int(self._sources[within])
        return source, int(self._numbers[within]) + rounds * self._weights[source]

    def _release(self, source: int) -> None:
        """Queue a source's next sample by its first admissible place."""
        heapq.heappush(self._waiting, (self._given[source] * self._period // self._weights[source], source))

    def _extend(self) -> None:
        start = len(self._sources)
        stop = min(start + _CHUNK, self._period)
        sources, numbers = np.empty(stop - start, np.int32), np.empty(stop - start, np.int64)
        for place in range(start, stop):
            while self._waiting and self._waiting[0][0] <= place:
                _, source = heapq.heappop(self._waiting)
                deadline = -(-(self._given[source] + 1) * self._period // self._weights[source])
                heapq.heappush(self._ready, (deadline, source))
            _, source = heapq.heappop(self._ready)
            sources[place - start], numbers[place - start] = source, self._given[source]
            self._given[source] += 1
            self._release(source)
        self._sources = np.concatenate([self._sources, sources])
        self._numbers = np.concatenate([self._numbers, numbers])


def integer_weights(weights: Sequence[Fraction]) -> list[int]:
    """Integers in the same proportions."""
    denominator = 1
    for weight in weights:
        denominator = denominator * weight.denominator // gcd(denominator, weight.denominator)
    return [int(weight * denominator) for weight in weights]


class BlendedDataset:
    """Sources mixed by weight; each goes through its own epochs."""

    def __init__(self, sources: Sequence[SampleSource], weights: Sequence[Fraction]) -> None:
        """
        Raises:
            ValueError: a weight is not positive.
        """
        if any(weight <= 0 for weight in weights):
            raise ValueError(f"blend weights {[float(weight) for weight in weights]} must all be above 0")
        assert len(sources) == len(weights) > 0, "one weight per source"
        self._sources = list(sources)
        self._schedule = Schedule(integer_weights(weights))

    @classmethod
    def by_size(cls, sources: Sequence[SampleSource]) -> BlendedDataset:
        """Weighted by size: the first `len(self)` samples are every sample of every source, once."""
        return cls(sources, [Fraction(len(source)) for source in sources])

    def __len__(self) -> int:
        return sum(map(len, self._sources))

    def read(self, position: int) -> Sample:
        source, number = self._schedule(position)
        return self._sources[source].read(number)

    def blank(self) -> Sample:
        return self._sources[0].blank()
