"""Is one checkpoint the other: every tensor bit for bit, and the configurations."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from hybrid.convert.compare import first_difference
from hybrid.convert.errors import CheckpointError
from hybrid.convert.names import hf_shapes
from hybrid.convert.parallel import Check, run_all
from hybrid.convert.sources import Checkpoint, weight_problems
from hybrid.convert.writer import Progress


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a comparison found."""

    tensors: int
    nbytes: int
    differences: list[str]
    """One line each; none if the two are the same."""


def compare_checkpoints(
    one: Checkpoint, other: Checkpoint, *, workers: int = 1, progress: Progress = lambda read: None
) -> Comparison:
    """Compare two checkpoints of any kind by their weights and their model configurations.

    Raises:
        ConfigError: one of them is not a whole checkpoint of the model its config.json describes.
    """
    for checkpoint in (one, other):
        problems, _ = weight_problems(checkpoint.store, checkpoint.config())
        if problems:
            raise CheckpointError(problems, str(checkpoint.path))
    theirs, ours = one.config().model_dump(), other.config().model_dump()
    differences = [f"config.json: {key} {theirs[key]} and {ours[key]}" for key in theirs if theirs[key] != ours[key]]
    names = [name for name in hf_shapes(one.config()) if name in other.store]
    found: dict[str, str] = {}
    lock = threading.Lock()

    def compare(name: str, check: Check) -> None:
        check()
        place = first_difference(one.store, name, other.store, name)
        with lock:
            if place is not None:
                found[name] = place
        progress(one.store.tensors[name].nbytes)

    run_all(compare, names, workers)
    differences += [f"{name}: {found[name]}" for name in names if name in found]
    return Comparison(
        tensors=len(names), nbytes=sum(one.store.tensors[name].nbytes for name in names), differences=differences
    )
