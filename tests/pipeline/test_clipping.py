"""A clipped update is that of one process, however small the norm and however many stages share it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.llama import compare_with, make_batches, make_engine, reference_loss, reference_model, small_config
from support.pool import WorkerPool

MAX_NORM, LR = 1e-6, 1e6
"""Together an update of norm 1, which fp32 weights show."""


@functools.cache
def reference() -> tuple[list[Any], float, dict[str, torch.Tensor]]:
    """Microbatches, the norm of their gradient, and the change of each weight in a step of torch's clipped SGD."""
    model = reference_model(small_config(), 5)
    batches = make_batches(4, 2, 8, 131)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    reference_loss(model, batches).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    return batches, float(norm), {name: param.detach() - before[name] for name, param in model.named_parameters()}


def clipped(pp: int, stage: int, batches: list[Any], changes: dict[str, torch.Tensor]) -> tuple[float, float]:
    """This rank's norm of the gradient, and the largest relative error of its weights' change."""
    engine, _ = make_engine(
        small_config(), pp=pp, stage=stage, micro_batches=4, optimizer="SGD", options={"lr": LR},
        gradient_clipping=MAX_NORM,
    )  # fmt: skip
    before = {param: param.detach().clone() for param in engine.module.parameters()}
    engine.train_batch(iter(batches))
    engine.optimizer.wait_parameters()
    result = engine.optimizer.result
    assert result is not None
    return result.grad_norm, compare_with(engine.module, changes, lambda param: param.detach() - before[param])


@pytest.mark.parametrize("stage", [0, 2])
def test_a_very_small_norm_over_stages(pool: WorkerPool, stage: int) -> None:
    batches, norm, changes = reference()
    for pp in (1, 2, 4):
        found = pool.run(clipped, pp, pp, stage, batches, changes)
        assert len({grad_norm for grad_norm, _ in found}) == 1  # bit for bit
        for grad_norm, error in found:
            assert grad_norm == pytest.approx(norm, rel=1e-5)
            assert error <= 1e-4
