"""DeepSpeed's batch triple, solved with the data-parallel size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybrid.config.errors import shown

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """`global_size = micro_size * accumulation_steps * data_parallel_size` samples per optimizer step."""

    global_size: int
    micro_size: int
    accumulation_steps: int
    data_parallel_size: int


def read_triple(tree: Mapping[str, Any], problems: list[str]) -> dict[str, int] | None:
    """The numbers that are given; "auto" is as good as absent. None if one is neither."""
    given, sound = {}, True
    for key in (TRAIN, MICRO, STEPS):
        value = tree.get(key, "auto")
        if value == "auto":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.append(f'{key} is {shown(value)}: it must be a whole number of at least 1, or "auto"')
            sound = False
        else:
            given[key] = value
    return given if sound else None


def implied_data_parallel_size(given: Mapping[str, int]) -> int:
    """The data-parallel size that all three numbers ask for, 1 if they leave it open or contradict each other."""
    if len(given) < 3:
        return 1
    per_replica = given[MICRO] * given[STEPS]
    return given[TRAIN] // per_replica if given[TRAIN] % per_replica == 0 else 1


def solve_batch(given: Mapping[str, int], data_parallel_size: int, grid: str, problems: list[str]) -> Batch | None:
    """Fill in what is missing, as DeepSpeed does.

    Args:
        grid: where the data-parallel size comes from, for the message.
    """
    train, micro, steps = given.get(TRAIN), given.get(MICRO), given.get(STEPS)
    if train is None and micro is None:
        problems.append(f"the batch size is open: set {TRAIN} or {MICRO}")
        return None
    if train is None:
        assert micro is not None
        train = micro * (steps or 1) * data_parallel_size
    known = (micro or 1) * (steps or 1) * data_parallel_size
    factors = [f"{MICRO} {micro}"] * (micro is not None) + [f"{STEPS} {steps}"] * (steps is not None)
    product = " x ".join([*factors, f"data-parallel size {data_parallel_size} ({grid})"])
    if micro is not None and steps is not None:
        if train != known:
            problems.append(
                f'{TRAIN} is {train}, but {product} = {known}: set {TRAIN} to {known}, or one of the three to "auto"'
            )
            return None
    elif train % known:
        problems.append(
            f"{TRAIN} is {train}, which {product} = {known} does not divide: "
            f"use {_multiples(train, known)} for {TRAIN}, or change the other"
        )
        return None
    if micro is None:
        steps = steps or 1
        micro = train // (steps * data_parallel_size)
    elif steps is None:
        steps = train // known
    assert steps is not None
    return Batch(global_size=train, micro_size=micro, accumulation_steps=steps, data_parallel_size=data_parallel_size)


def _multiples(value: int, of: int) -> str:
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)


def check_without_world(given: Mapping[str, int], problems: list[str]) -> None:
    """What is wrong with the triple at any data-parallel size."""
    train, known = given.get(TRAIN), given.get(MICRO, 1) * given.get(STEPS, 1)
    if train is None and MICRO not in given:
        problems.append(f"the batch size is open: set {TRAIN} or {MICRO}")
    if train is not None and train % known:
        problems.append(
            f"{TRAIN} is {train}, which {MICRO} {given.get(MICRO, 1)} x {STEPS} {given.get(STEPS, 1)} = {known} does "
            f"not divide at any data-parallel size: use {_multiples(train, known)} for {TRAIN}, or change the other"
        )
