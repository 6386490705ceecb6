"""Each mapping against the mathematics it states, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.pool import WorkerPool

from hybrid.tensor_parallel import mappings

SHAPE = (8, 3, 5)


def _values(rank: int, what: str, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * rank + len(what)))


def _run(name: str, alike: bool, out_shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    x = _values(0 if alike else rank, "input").requires_grad_()
    y = getattr(mappings, name)(x, dist.group.WORLD)
    y.backward(_values(rank, "gradient", out_shape))
    return y.detach(), x.grad


@pytest.mark.parametrize("world", [2, 4])
def test_against_definition(pool: WorkerPool, world: int) -> None:
    part = (SHAPE[0] // world, *SHAPE[1:])
    whole = (SHAPE[0] * world, *SHAPE[1:])
    inputs = [_values(r, "input") for r in range(world)]

    def gradients(shape: tuple[int, ...]) -> list[torch.Tensor]:
        return [_values(r, "gradient", shape) for r in range(world)]

    total, summed = torch.stack(inputs).sum(0), torch.stack(gradients(SHAPE)).sum(0)
    gathered, scattered = torch.cat(inputs), torch.cat(gradients(part))
    expected = {
        "copy_to_tensor_parallel": (True, SHAPE, [inputs[0]] * world, [summed] * world),
        "reduce_from_tensor_parallel": (False, SHAPE, [total] * world, gradients(SHAPE)),
        "scatter_to_sequence_parallel": (True, part, inputs[0].chunk(world), [scattered] * world),
        "gather_from_sequence_parallel": (
            False,
            whole,
            [gathered] * world,
            torch.stack(gradients(whole)).sum(0).chunk(world),
        ),
        "reduce_scatter_to_sequence_parallel": (False, part, total.chunk(world), [scattered] * world),
    }
    for name, (alike, out_shape, outputs, grads) in expected.items():
        for rank, (y, grad) in enumerate(pool.run(_run, world, name, alike, out_shape)):
            # Sums of at most four fp32 terms, in another order.
            torch.testing.assert_close(y, outputs[rank], rtol=1e-6, atol=1e-6, msg=name)
            torch.testing.assert_close(grad, grads[rank], rtol=1e-6, atol=1e-6, msg=name)


def _inputs_survive() -> bool:
    x = torch.full((4,), float(dist.get_rank()))
    y = x.clone().requires_grad_()
    mappings.reduce_from_tensor_parallel(y, dist.group.WORLD)
    upstream = torch.ones(4)
    mappings.copy_to_tensor_parallel(y, dist.group.WORLD).backward(upstream)
    return torch.equal(y.detach(), x) and torch.equal(upstream, torch.ones(4))


def test_inputs_and_upstream_gradients_are_not_overwritten(pool: WorkerPool) -> None:
    assert all(pool.run(_inputs_survive, 2))


def test_identity_with_no_group() -> None:
    x = torch.randn(4, 2)
    for name in dir(mappings):
        if name.endswith("_parallel"):
            assert getattr(mappings, name)(x, None) is x
