"""The loss scale, overflow by overflow."""

import pytest

from hybrid.optim.loss_scaler import LossScaler


def scales(overflows, **config):
    """The scale after each step: `x` overflowed, `.` did not."""
    scaler, seen = LossScaler({"initial_scale_power": 4, **config}), []
    for overflow in overflows:
        scaler.update(overflow == "x")
        seen.append(scaler.scale)
        # A resumed run goes on where it was.
        state, scaler = scaler.state_dict(), LossScaler({"initial_scale_power": 4, **config})
        scaler.load_state_dict(state)
    return seen


def test_halved_by_overflow_and_doubled_by_a_window_without():
    assert scales("x..x....", hysteresis=1, loss_scale_window=2) == [8, 8, 16, 8, 8, 16, 16, 32]
    assert scales(".x.", hysteresis=1, loss_scale_window=1) == [32, 16, 32]


def test_hysteresis_forgives_and_is_refilled_when_the_scale_grows():
    assert scales("xxx", hysteresis=3) == [16, 16, 8]
    assert scales("x.x.x", hysteresis=2) == [16, 16, 8, 8, 4]
    assert scales("x..x", hysteresis=2, loss_scale_window=2) == [16, 16, 32, 32]
    assert scales("x.x.x", hysteresis=2, consecutive_hysteresis=True) == [16] * 5


def test_overflow_at_the_minimum_is_an_error():
    assert scales("xx", hysteresis=1, min_loss_scale=4) == [8, 4]
    with pytest.raises(RuntimeError, match=r"minimum loss scale 4 \(fp16.min_loss_scale\)"):
        scales("xxx", hysteresis=1, min_loss_scale=4)


def test_a_static_scale_stays():
    assert scales("x.x", loss_scale=128) == [128] * 3


def test_deepspeeds_defaults():
    scaler = LossScaler({})
    assert scaler.dynamic and scaler.scale == 2**16
    assert scales("." * 999) == [16] * 999 and scales("." * 1000)[-1] == 32
