"""The simulated pipeline schedule."""

from __future__ import annotations

import pytest

from hybrid.planner.simulate import simulate


def test_a_receive_waits_for_its_send() -> None:
    streams = [["ForwardPass", "SendActivation"] * 2, ["RecvActivation", "ForwardPass"] * 2]
    first, second = simulate(streams, [{"ForwardPass": 2.0}, {"ForwardPass": 1.0}])
    assert [(s.start, s.end) for s in first if s.name == "ForwardPass"] == [(0, 2), (2, 4)]
    assert [(s.start, s.end) for s in second if s.name == "ForwardPass"] == [(2, 3), (4, 5)]


def test_a_schedule_that_cannot_go_on() -> None:
    with pytest.raises(AssertionError, match="deadlock"):
        simulate([["RecvGrad"], ["RecvActivation"]], [{}, {}])
