"""Data that end within a step, and microbatches of several lengths: every rank says so, and none waits for another."""

from __future__ import annotations

import pytest
import torch
from support.llama import make_batches, make_engine, my_batches, small_config
from support.pool import WorkerPool

from hybrid.optim.engine import HybridEngine
from hybrid.optim.reading import Batch

LAYOUTS = [
    ({"pp": 1}, 1),
    ({"tp": 2, "sp": True}, 2),
    ({"pp": 2}, 2),
    ({"pp": 2, "chunks": 2}, 2),
    ({"pp": 2}, 4),
    ({"pp": 4}, 4),
]
WHOLE, ENDED, EMPTY, RAGGED = [4, 4], [4], [], [4, 2]


def outcome(engine: HybridEngine, batches: list[Batch], evaluate: bool) -> float | str:
    """The loss, or the error."""
    try:
        return engine.evaluate(iter(batches), 2)[0] if evaluate else float(engine.train_batch(iter(batches)))
    except ValueError as error:
        return str(error)


def outcomes(layout: dict[str, int], fault_of: int) -> list[tuple[object, ...]]:
    """By lengths of the microbatches: outcomes of a step and of an evaluation, and whether the weights are as before.
    One data-parallel rank reads these lengths, another whole steps."""
    found: list[tuple[object, ...]] = []
    for lengths in (WHOLE, ENDED, EMPTY, RAGGED):
        engine, grid = make_engine(small_config(), batch=1, seq=4, micro_batches=2, optimizer="SGD", **layout)
        own = lengths if grid.data_rank == fault_of else WHOLE
        batches = [make_batches(1, 1, length, 131, seed=number)[0] for number, length in enumerate(own)]
        before = [param.detach().clone() for param in engine.module.parameters()]
        results = [outcome(engine, batches, evaluate) for evaluate in (False, True)]
        engine.optimizer.wait_parameters()
        same = all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
        found.append((*results, same))
    return found


@pytest.mark.parametrize(("layout", "world"), LAYOUTS, ids=str)
def test_all_ranks_end_with_one_message(pool: WorkerPool, layout: dict[str, int], world: int) -> None:
    results = pool.run(outcomes, world, layout, 0)
    for whole, *broken in results:
        assert isinstance(whole[0], float) and isinstance(whole[1], float) and not whole[2]
        for step, evaluation, same in broken[:2]:
            assert step == evaluation == "rank 0: the data end within a step, or an evaluation: give whole ones"
            assert same
        step, evaluation, same = broken[2]
        if layout.get("pp", 1) > 1:
            assert step == evaluation and same
            assert str(step).startswith("rank 0: a microbatch of 1 x 2 tokens follows those of 1 x 4: under a pipeline")
        else:
            assert isinstance(step, float) and not same


def losses_of(lengths: list[int], layout: dict[str, int], pad_to: int) -> float:
    """The loss of a step of one microbatch of each length, padded."""
    engine, grid = make_engine(small_config(), batch=1, seq=4, micro_batches=len(lengths), optimizer="SGD", **layout)
    batches = []
    for number, length in enumerate(lengths):
        ((ids, labels),) = make_batches(1, 1, length, 131, seed=number)
        more = (0, max(0, pad_to - length))
        batches.append((torch.nn.functional.pad(ids, more), torch.nn.functional.pad(labels, more, value=-100)))
    return float(engine.train_batch(iter(my_batches(batches, grid, len(lengths)))))


def test_padding_changes_nothing(pool: WorkerPool) -> None:
    (ragged,) = pool.run(losses_of, 1, [3, 5], {}, 0)
    for pp in (1, 2):
        assert pool.run(losses_of, pp, [3, 5], {"pp": pp}, 5) == pytest.approx([ragged] * pp, rel=1e-5)
