"""Column- and row-parallel layers against torch.nn.functional.linear, and what they communicate when."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.pool import WorkerPool
from tensor_parallel.meters import Events, LiveStorage

from hybrid.config.parallel import even_shard
from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from hybrid.tensor_parallel.params import param_spec

S, B, N, M = 8, 3, 12, 16


def _full(name: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))), dtype=torch.float64)


def _part(x: torch.Tensor, tp: TensorParallel, dim: int = 0) -> torch.Tensor:
    return x.chunk(tp.size, dim)[tp.rank].contiguous()


def _tp(sequence_parallel: bool) -> TensorParallel:
    return TensorParallel.over(dist.group.WORLD, sequence_parallel=sequence_parallel)


def _column(tp: TensorParallel, bias: bool = True) -> ColumnParallelLinear:
    outputs = [(name, even_shard(M, tp.size, tp.rank)) for name in ("one", "two")]
    layer = ColumnParallelLinear(N, outputs, bias=bias, tp=tp, dtype=torch.float64, device="cpu")
    _load(layer)
    return layer


def _row(tp: TensorParallel, bias: bool = True) -> RowParallelLinear:
    shard = even_shard(N, tp.size, tp.rank)
    layer = RowParallelLinear(shard, M, name="row", bias=bias, tp=tp, dtype=torch.float64, device="cpu")
    _load(layer)
    return layer


@torch.no_grad()
def _load(layer: torch.nn.Module) -> None:
    for param in layer.parameters():
        for segment in param_spec(param).segments:
            param[segment.local] = _full(segment.hf_name, *segment.hf_shape)[segment.source]


def _check(actual: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert actual is not None and expected is not None
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)  # fp64: only the order of sums differs


def _column_matches(sequence_parallel: bool) -> None:
    tp = _tp(sequence_parallel)
    layer = _column(tp)
    twin_x = _full("x", S, B, N).requires_grad_()
    weight = torch.cat([_full(f"{n}.weight", M, N) for n in ("one", "two")]).requires_grad_()
    bias = torch.cat([_full(f"{n}.bias", M) for n in ("one", "two")]).requires_grad_()
    grad = _full("grad", S, B, 2 * M)
    twin_y = F.linear(twin_x, weight, bias)
    twin_y.backward(grad)

    def mine(x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([_part(half, tp, dim) for half in x.chunk(2, dim)], dim)

    x = (_part(twin_x.detach(), tp) if tp.sequence_sharded else twin_x.detach().clone()).requires_grad_()
    y = layer(x)
    _check(y, mine(twin_y.detach(), -1))
    y.backward(mine(grad, -1))
    _check(x.grad, _part(twin_x.grad, tp) if tp.sequence_sharded else twin_x.grad)
    _check(layer.weight.grad, mine(weight.grad, 0))
    _check(layer.bias.grad, mine(bias.grad, 0))


def _row_matches(sequence_parallel: bool) -> None:
    tp = _tp(sequence_parallel)
    layer = _row(tp)
    twin_x = _full("x", S, B, N).requires_grad_()
    weight, bias = _full("row.weight", M, N).requires_grad_(), _full("row.bias", M).requires_grad_()
    grad = _full("grad", S, B, M)
    twin_y = F.linear(twin_x, weight, bias)
    twin_y.backward(grad)

    x = _part(twin_x.detach(), tp, -1).requires_grad_()
    y = layer(x)
    sharded = tp.sequence_sharded
    _check(y, _part(twin_y.detach(), tp) if sharded else twin_y.detach())
    y.backward(_part(grad, tp) if sharded else grad)
    _check(x.grad, _part(twin_x.grad, tp, -1))
    _check(layer.weight.grad, _part(weight.grad, tp, -1))
    assert param_spec(layer.bias).sequence_partial == sharded
    bias_grad = layer.bias.grad.clone()
    if sharded:
        dist.all_reduce(bias_grad)
    _check(bias_grad, bias.grad)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_against_unsharded_twin(pool: WorkerPool, world: int, sequence_parallel: bool) -> None:
    pool.run(_column_matches, world, sequence_parallel)
    pool.run(_row_matches, world, sequence_parallel)


def _events(kind: str, sequence_parallel: bool, frozen: bool, leaf_input: bool) -> tuple[list[str], list[str]]:
    tp = _tp(sequence_parallel)
    layer = (_column if kind == "column" else _row)(tp)
    layer.requires_grad_(not frozen)
    shape = (S // tp.size, B, N) if tp.sequence_sharded else (S, B, N)
    x = torch.randn(shape if kind == "column" else (S, B, N // tp.size), dtype=torch.float64)
    x.requires_grad_(not leaf_input)
    with Events() as forward:
        y = layer(x)
    with Events() as backward:
        y.backward(torch.randn_like(y))
    return forward.names, backward.names


@pytest.mark.parametrize(
    ("kind", "sequence_parallel", "forward", "backward"),
    [
        # The all-gather goes out before dX is computed, the reduction of dX before dW is; where dX needs what is
        # gathered, the rows at hand come first.
        ("column", True, ["all_gather", "gemm"], ["all_gather", "gemm", "reduce_scatter", "gemm"]),
        ("column", False, ["gemm"], ["gemm", "all_reduce", "gemm"]),
        ("row", True, ["gemm", "reduce_scatter"], ["all_gather", "gemm", "gemm", "gemm"]),
        ("row", False, ["gemm", "all_reduce"], ["gemm", "gemm"]),
    ],
)
def test_launch_order(
    pool: WorkerPool, kind: str, sequence_parallel: bool, forward: Sequence[str], backward: Sequence[str]
) -> None:
    for result in pool.run(_events, 2, kind, sequence_parallel, False, False):
        assert result == (forward, backward)


def test_only_the_gradients_asked_for_are_computed(pool: WorkerPool) -> None:
    frozen = pool.run(_events, 2, "column", True, True, False)[0][1]
    assert frozen == ["gemm", "reduce_scatter"]
    first_layer = pool.run(_events, 2, "column", True, False, True)[0][1]
    assert first_layer == ["all_gather", "gemm"]
    assert pool.run(_events, 2, "row", True, True, False)[0][1] == ["all_gather", "gemm", "gemm"]
    assert pool.run(_events, 2, "row", False, False, True)[0][1] == ["gemm"]


def test_no_collective_at_size_one(pool: WorkerPool) -> None:
    for kind in ("column", "row"):
        assert pool.run(_events, 1, kind, True, False, False)[0] == (["gemm"], ["gemm", "gemm"])


def _saved(sequence_parallel: bool) -> int:
    tp = _tp(sequence_parallel)
    layer = _column(tp)
    x = torch.randn(S // tp.size if tp.sequence_sharded else S, B, N, dtype=torch.float64, requires_grad=True)
    with LiveStorage([*layer.parameters(), x]) as live:
        y = layer(x)
        output = y.untyped_storage().nbytes()
    # The backend's thread lets go of the buffers of a finished collective a moment after the wait for it.
    deadline = time.monotonic() + 5
    while live.bytes > output and time.monotonic() < deadline:
        time.sleep(0.01)
    return live.bytes - output


def test_the_gathered_input_is_not_kept(pool: WorkerPool) -> None:
    assert pool.run(_saved, 2, True) == [0, 0]


def test_frozen_layer_keeps_no_activation() -> None:
    layer = _column(TensorParallel.single())
    x = torch.randn(S, B, N, dtype=torch.float64, requires_grad=True)
    for frozen, expected in ((False, True), (True, False)):
        layer.requires_grad_(not frozen)
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # noqa: B023
            layer(x)
        assert any(t.data_ptr() == x.data_ptr() for t in saved) == expected


def test_no_bias_and_bf16() -> None:
    tp = TensorParallel.single()
    layer = ColumnParallelLinear(N, [("q", even_shard(M, 1, 0))], bias=False, tp=tp, dtype=torch.bfloat16, device="cpu")
    assert layer.bias is None and [name for name, _ in layer.named_parameters()] == ["weight"]
    with torch.no_grad():
        layer.weight.normal_()
    layer(torch.randn(S, B, N, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.bfloat16
