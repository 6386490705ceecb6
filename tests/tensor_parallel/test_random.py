"""Random streams, and recomputation that draws from them again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tensor_parallel.meters import LiveStorage
from torch import Tensor, nn

from hybrid.tensor_parallel.random import DiscardedOutput, RNGTracker, checkpoint


def _draw(tracker: RNGTracker) -> Tensor:
    with tracker.fork():
        return torch.rand(4)


def test_streams_differ_by_rank_and_leave_the_default_one_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    trackers = [RNGTracker.for_rank(5, rank) for rank in range(2)]
    first, second = (_draw(tracker) for tracker in trackers)
    assert not torch.equal(first, second)
    assert torch.equal(torch.rand(4), expected)
    assert torch.equal(_draw(RNGTracker.for_rank(5, 0)), first)
    assert not torch.equal(_draw(trackers[0]), first), "the stream moves on"


def test_state_round_trip() -> None:
    tracker = RNGTracker.for_rank(1, 0)
    _draw(tracker)
    state = tracker.state()
    drawn = _draw(tracker)
    tracker.load_state(state)
    assert torch.equal(_draw(tracker), drawn)


def test_default_stream_comes_back_after_an_error() -> None:
    tracker = RNGTracker.for_rank(1, 0)
    before = torch.get_rng_state()
    with pytest.raises(KeyError), tracker.fork():
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)


def test_checkpoint_repeats_both_streams() -> None:
    tracker = RNGTracker.for_rank(3, 0)

    def layer(x: Tensor) -> Tensor:
        with tracker.fork():
            x = F.dropout(x.sin(), 0.5)
        return F.dropout(x.cos(), 0.5)

    grads, streams = [], []
    for run in (layer, lambda x: checkpoint(layer, x, rng=tracker)):
        torch.manual_seed(0)
        tracker.load_state(RNGTracker.for_rank(3, 0).state())
        x = torch.linspace(0, 1, 64).requires_grad_()
        y = run(run(x))
        y.sum().backward()
        grads.append(x.grad)
        streams.append(torch.cat((tracker.state()["tensor-parallel"], torch.get_rng_state())))
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(streams[0], streams[1]), "recomputation leaves the streams where the forward pass left them"


class _Square(torch.autograd.Function):
    """x^2, keeping x only; counts how often it runs."""

    calls = 0

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        _Square.calls += 1
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return 2 * x * grad


def _twice(linear: Callable[[Tensor], Tensor], x: Tensor, discard: bool) -> Tensor:
    for _ in range(2):
        discarded = DiscardedOutput()
        y = linear(discarded.run(_Square.apply, x))
        if discard:
            discarded.discard_after(y)
        x = y.sin()
    return x


@pytest.mark.parametrize("frozen", [False, True])
def test_discarded_output_gives_the_same_gradients_from_less_memory(frozen: bool) -> None:
    linear = nn.Linear(32, 32)
    linear.weight.requires_grad_(not frozen)
    grads, held = [], []
    for discard in (False, True):
        linear.zero_grad()
        x = torch.linspace(-1, 1, 64 * 32).view(64, 32).requires_grad_()
        with LiveStorage(linear.parameters()) as live:
            y = _twice(linear, x, discard)
            held.append(live.bytes)
        y.sum().backward()
        grads.append([x.grad, *(p.grad for p in linear.parameters() if p.requires_grad)])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    if not frozen:
        assert held[0] - held[1] == 2 * 64 * 32 * 4


def test_discarded_output_survives_a_retained_graph() -> None:
    linear = nn.Linear(4, 4)
    x = torch.rand(3, 4, requires_grad=True)
    y = _twice(linear, x, discard=True).sum()
    y.backward(retain_graph=True)
    first = linear.weight.grad.clone()
    y.backward()
    torch.testing.assert_close(linear.weight.grad, 2 * first)


def test_discarded_output_is_released_after_backward() -> None:
    linear = nn.Linear(64, 64)
    x = torch.rand(1024, 64, requires_grad=True)
    with LiveStorage(linear.parameters()) as live:
        y = _twice(linear, x, discard=True).sum()  # kept, as a logged loss is
        y.backward()
        # x.grad, the layer's gradients, and small change; no activation (256 KiB each).
        assert live.bytes < x.grad.untyped_storage().nbytes() + 64 * 1024


def test_discarded_output_in_evaluation() -> None:
    linear = nn.Linear(4, 4)
    x = torch.rand(3, 4)
    _Square.calls = 0
    with torch.no_grad():
        y = _twice(linear, x, discard=True)
    assert _Square.calls == 2 and torch.equal(y, _twice(linear, x, discard=False))
