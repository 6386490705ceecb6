"""The batch triple: what is filled in, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.config.batch import MICRO, STEPS, TRAIN, implied_data_parallel_size, read_triple, solve_batch

SIZES = st.integers(1, 64)


@pytest.mark.parametrize(
    ("triple", "dp", "solved"),
    [
        ({TRAIN: 4, MICRO: 1, STEPS: 2}, 2, (4, 1, 2)),
        ({TRAIN: 16, MICRO: 4}, 2, (16, 4, 2)),
        ({TRAIN: 16, STEPS: 4}, 2, (16, 2, 4)),
        ({MICRO: 4, STEPS: 4}, 2, (32, 4, 4)),
        ({TRAIN: 16}, 2, (16, 8, 1)),
        ({MICRO: 4}, 2, (8, 4, 1)),
        ({TRAIN: 16, MICRO: "auto", STEPS: "auto"}, 4, (16, 4, 1)),
    ],
)
def test_solved_as_deepspeed_does(triple: dict[str, object], dp: int, solved: tuple[int, int, int]) -> None:
    problems: list[str] = []
    given_numbers = read_triple(triple, problems)
    assert given_numbers is not None
    batch = solve_batch(given_numbers, dp, "", problems)
    assert problems == [] and batch is not None
    assert (batch.global_size, batch.micro_size, batch.accumulation_steps) == solved


@given(micro=SIZES, steps=SIZES, dp=SIZES, keep=st.sets(st.sampled_from([TRAIN, MICRO, STEPS])))
def test_any_two_numbers_give_the_third(micro: int, steps: int, dp: int, keep: set[str]) -> None:
    whole = {TRAIN: micro * steps * dp, MICRO: micro, STEPS: steps}
    problems: list[str] = []
    batch = solve_batch({key: whole[key] for key in keep}, dp, "", problems)
    if not keep & {TRAIN, MICRO}:
        assert batch is None and "set train_batch_size or" in problems[0]
        return
    assert batch is not None and problems == []
    assert batch.global_size == batch.micro_size * batch.accumulation_steps * dp
    if len(keep) >= 2:
        assert (batch.global_size, batch.micro_size, batch.accumulation_steps) == tuple(whole.values())


def test_the_message_shows_the_arithmetic_with_the_data_parallel_size() -> None:
    problems: list[str] = []
    assert solve_batch({TRAIN: 5, MICRO: 1, STEPS: 2}, 2, "world size 4 / (tensor 2 x pipeline 1)", problems) is None
    (message,) = problems
    assert "train_batch_size is 5" in message and "set train_batch_size to 4" in message
    assert "x data-parallel size 2 (world size 4 / (tensor 2 x pipeline 1)) = 4" in message


def test_indivisible_sizes_name_the_neighbours() -> None:
    problems: list[str] = []
    assert solve_batch({TRAIN: 10, MICRO: 2}, 2, "", problems) is None
    assert "use 8 or 12 for train_batch_size" in problems[0]


@pytest.mark.parametrize("value", [0, -1, True, 2.5, "8", None])
def test_values_that_are_no_sizes(value: object) -> None:
    problems: list[str] = []
    assert read_triple({TRAIN: value}, problems) is None
    assert problems[0].startswith("train_batch_size is ")


def test_a_complete_triple_implies_the_data_parallel_size() -> None:
    assert implied_data_parallel_size({TRAIN: 16, MICRO: 2, STEPS: 2}) == 4
    assert implied_data_parallel_size({TRAIN: 16, MICRO: 2}) == 1
    assert implied_data_parallel_size({TRAIN: 5, MICRO: 1, STEPS: 2}) == 1
