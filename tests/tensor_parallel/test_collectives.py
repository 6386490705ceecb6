"""The collectives of the tensor axis: torch's own, as a GPU has them, and the all-to-alls that stand for them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.pool import WorkerPool
from support.tracer import Tracer

from hybrid.tensor_parallel import collectives


def _inputs(size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What each rank brings, whole numbers: every sum is exact in any order."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(-8, 9, (2 * size, 3), generator=generator).to(dtype) for _ in range(size)]


def _results(dtype: torch.dtype, exchanged: bool) -> list[str]:
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    brought = _inputs(size, dtype)
    mine, total = brought[rank], torch.stack(brought).sum(0)
    # Columns make it strided, and one row is what a sequence of the group's size leaves to each rank.
    strided = torch.stack((mine, mine), dim=-1)[..., 0]
    with mock.patch.object(collectives, "by_exchange", lambda x: exchanged), Tracer() as tracer:
        assert torch.equal(collectives.all_gather(strided, group), torch.cat(brought))
        assert torch.equal(collectives.all_gather(mine[:1], group), torch.cat([x[:1] for x in brought]))
        assert torch.equal(collectives.reduce_scatter(strided, group), total[2 * rank : 2 * rank + 2])
        summed = mine.clone()
        assert torch.equal(collectives.all_reduce(summed, group), total) and torch.equal(summed, total)
        largest = mine.clone()
        assert torch.equal(collectives.all_reduce_max(largest, group), torch.stack(brought).amax(0))
    return [f"{call.op} {call.payload}" for call in tracer.collectives]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 4])
def test_results_and_counts(pool: WorkerPool, world: int, dtype: torch.dtype) -> None:
    whole, row = 2 * world * 3 * dtype.itemsize, 3 * dtype.itemsize
    expected = [f"all_gather {world * whole}", f"all_gather {world * row}", f"reduce_scatter {whole}"]
    expected += [f"all_reduce {whole}"] * 2
    for exchanged in (True, False):
        assert pool.run(_results, world, dtype, exchanged) == [expected] * world
