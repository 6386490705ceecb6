"""Plans in words."""

from __future__ import annotations

import pytest

from hybrid.planner.ask import request_of
from hybrid.planner.search import search
from hybrid.planner.text import describe_search, rounded


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (131, "131"),
        (1_000, "1.0 K"),
        (999_949, "999.9 K"),
        (999_951, "1.0 M"),
        (3_950_848, "4.0 M"),
        (999_999_999, "1.0 B"),
        (70_553_706_496, "70.6 B"),
        (1_008_000_000_000, "1008.0 B"),
    ],
)
def test_counts_have_the_unit_that_suits_them(count: int, text: str) -> None:
    assert rounded(count) == text


def test_a_tiny_model_has_parameters() -> None:
    request = request_of(None, "demo", 1, "h100", 128, 4)
    assert describe_search(request, search(request), 1)[0].startswith("4.0 M parameters on 1 x ")
