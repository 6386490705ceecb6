"""Batch ramp-up: Megatron's rule, a function of the samples consumed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.config.rampup import BatchRampup


def test_the_batch_grows_at_even_distances() -> None:
    ramp = BatchRampup(start=16, increment=8, samples=300, final=40)
    assert ramp.stages == [16, 24, 32, 40]
    sizes = [ramp.global_batch_size(consumed) for consumed in (0, 99, 100, 199, 200, 299, 300, 10**9)]
    assert sizes == [16, 16, 24, 24, 32, 32, 40, 40]


@given(start=st.integers(1, 20), increment=st.integers(1, 9), stages=st.integers(0, 6), samples=st.integers(0, 500))
def test_samples_after_counts_the_steps(start: int, increment: int, stages: int, samples: int) -> None:
    ramp = BatchRampup(start=start, increment=increment, samples=samples, final=start + stages * increment)
    consumed = 0
    for step in range(30):
        assert ramp.samples_after(step) == consumed
        assert ramp.global_batch_size(consumed) in ramp.stages
        consumed += ramp.global_batch_size(consumed)


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="from 16 by 7 does not arrive at the global batch size 40"):
        BatchRampup(start=16, increment=7, samples=300, final=40)
    with pytest.raises(ValueError, match="positive start"):
        BatchRampup(start=0, increment=8, samples=300, final=40)
    ramp = BatchRampup(start=16, increment=8, samples=300, final=40)
    ramp.check(4, 2)
    with pytest.raises(ValueError, match=r"sizes \[24, 40\] are no multiples of micro batch 4 x data-parallel size 4"):
        ramp.check(4, 4)
