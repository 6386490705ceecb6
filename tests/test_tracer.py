"""The tracer that the exact counts of other tests rest on."""

# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from support.pool import WorkerPool
from support.tracer import Tracer

Seen = list[tuple[str, int, int, str | None]]


def _seen(tracer: Tracer) -> Seen:
    return [(c.op, c.payload, c.group_size, None if c.dtype is None else str(c.dtype)) for c in tracer.collectives]


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def one_of_each() -> Seen:
    x, peer, world = torch.ones(8), 1 - dist.get_rank(), _world()
    with Tracer() as tracer:
        dist.all_reduce(x)
        dist.all_gather([torch.empty(8), torch.empty(8)], x)
        dist.all_gather_into_tensor(torch.empty(16, dtype=torch.bfloat16), x.bfloat16())
        dist.reduce_scatter_tensor(torch.empty(4), x)
        dist.all_to_all_single(torch.empty(8), x)
        dist.broadcast(x, 0)
        sent, received = dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, torch.empty(8), peer)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()
        dist.barrier()
        functional.all_reduce(x, "sum", world).sum()
    assert all(c.waited_at is not None for c in tracer.collectives)
    return _seen(tracer)


def overlapped() -> tuple[list[str], list[int]]:
    x, weight, world = torch.ones(4, 8), torch.ones(8, 16), _world()
    with Tracer() as tracer:
        tracer.mark("start")
        early = dist.all_reduce(x, async_op=True)
        y = torch.ones(4, 8) @ weight
        assert early is not None
        early.wait()
        tracer.mark("late")
        dist.all_reduce(y)
        lazy = functional.all_reduce(y, "sum", world)
        y @ y.t()
        lazy + 1
    return tracer.names, [c.hidden_flops for c in tracer.collectives]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def in_backward() -> list[str]:
    tracer, x = Tracer(), torch.ones(4, requires_grad=True)
    with tracer:
        loss: Any = _Sum.apply(x).sum()
        tracer.mark("backward")
        loss.backward()
    return tracer.names


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_collective_is_seen_with_its_payload(pool: WorkerPool) -> None:
    expected = [
        ("all_reduce", 32, 2, "torch.float32"),
        ("all_gather", 64, 2, "torch.float32"),
        ("all_gather", 32, 2, "torch.bfloat16"),
        ("reduce_scatter", 32, 2, "torch.float32"),
        ("all_to_all", 32, 2, "torch.float32"),
        ("broadcast", 32, 2, "torch.float32"),
        ("send", 32, 2, "torch.float32"),
        ("recv", 32, 2, "torch.float32"),
        ("barrier", 0, 2, None),
        ("all_reduce", 32, 2, "torch.float32"),
    ]
    for seen in pool.run(one_of_each, 2):
        # gloo has no barrier of its own: torch may build it from other collectives, below the dispatcher.
        assert sorted(seen, key=str) == sorted(expected, key=str)


def test_flops_between_issue_and_wait(pool: WorkerPool) -> None:
    names, hidden = pool.run(overlapped, 2)[0]
    assert names == ["start", "all_reduce", "late", "all_reduce", "all_reduce"]
    assert hidden == [2 * 4 * 8 * 16, 0, 2 * 4 * 16 * 4]


def test_backward_is_seen(pool: WorkerPool) -> None:
    assert pool.run(in_backward, 2) == [["backward", "all_reduce"]] * 2


def test_flops_of_matmuls_and_attention() -> None:
    x, weight = torch.ones(4, 8), torch.ones(16, 8, requires_grad=True)
    with Tracer() as tracer:
        F.linear(x, weight).sum().backward()
    assert tracer.flops == 2 * (2 * 4 * 8 * 16)
    with torch.inference_mode(), Tracer() as tracer:
        F.linear(x, weight)
    assert tracer.flops == 2 * 4 * 8 * 16
    with Tracer() as tracer:
        torch.ones(4, 16).addmm_(x, weight.detach().t())
    assert tracer.flops == 2 * 4 * 8 * 16
    query, key, value = (torch.randn(2, 4, 32, 8, requires_grad=True) for _ in range(3))
    with Tracer() as tracer:
        F.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()
    forward = 2 * (2 * 2 * 4 * 32 * 32 * 8)
    # The fused backward also multiplies Q and K again.
    assert tracer.flops == forward + 5 * forward // 2


def test_live_bytes_follow_storages_not_tensors() -> None:
    parameter = torch.zeros(100)
    with Tracer() as tracer:
        parameter.add_(1)
        parameter[:10].mul_(2)
        assert tracer.live_bytes == 0
        x = torch.ones(100)
        view = x[:50].view(5, 10)
        assert tracer.live_bytes == 400
        y = x + view.sum()
        del x
        assert tracer.live_bytes == 800
        del view
        assert tracer.live_bytes == 400
        y.untyped_storage().resize_(0)
        assert tracer.live_bytes == 0
    assert tracer.peak_bytes == 400 + 400 + 4
    assert tracer.operators == 8  # add_, slice, mul_, ones, slice, view, sum, add
    assert Tracer(counted=[parameter, parameter[3:]]).live_bytes == 400


def test_waiting_is_put_back() -> None:
    original = dist.Work.wait
    with Tracer():
        assert dist.Work.wait is not original
    assert dist.Work.wait is original
