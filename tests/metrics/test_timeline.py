"""The recorded timeline of pipeline instructions: what it holds, how it is written, the bubble it shows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.llama import make_batches, make_engine, my_batches, small_config

from hybrid.metrics.timeline import (
    Event,
    TimelineRecorder,
    bubble_ratio,
    busy_seconds,
    find_straggler,
    profiled,
    read_timeline,
    timeline_steps,
    write_timeline,
)
from hybrid.pipeline.schedule import PassSchedule
from hybrid.planner.simulate import simulate


def streams(stages: int, micro_batches: int) -> list[list[str]]:
    """The instructions of 1F1B, by name."""
    names = []
    for stage in range(stages):
        schedule = PassSchedule(micro_batches, stages, stage)
        names.append([type(instruction).__name__ for step in schedule for instruction in step])
    return names


def events_of(slots: Any) -> list[list[Event]]:
    return [[Event(name=s.name, start=s.start, end=s.end, micro_batch=s.micro_batch) for s in stage] for stage in slots]


@pytest.mark.parametrize("micro_batches", [4, 8, 16])
def test_the_bubble_of_equal_stages(micro_batches: int) -> None:
    seconds = [{"ForwardPass": 1.0, "BackwardPass": 2.0}] * 4
    timeline = events_of(simulate(streams(4, micro_batches), seconds))
    assert bubble_ratio(timeline) == pytest.approx(3 / micro_batches, rel=0.1)
    assert [busy_seconds(events) for events in timeline] == [3.0 * micro_batches] * 4


def test_a_slow_stage_sets_the_pace() -> None:
    seconds = [{"ForwardPass": 1.0, "BackwardPass": 2.0}] * 3 + [{"ForwardPass": 2.0, "BackwardPass": 4.0}]
    timeline = events_of(simulate(streams(4, 8), seconds))
    span = max(e.end for events in timeline for e in events)
    # m slots of the slowest stage and one of each other, within the slots in which 1F1B lets stages wait for another.
    assert 8 * 6 + 3 * 3 <= span <= 8 * 6 + 3 * 3 + 6
    straggler = find_straggler([busy_seconds(events) for events in timeline], [0, 1, 2, 3])
    assert (straggler.rank, straggler.stage, straggler.ratio) == (3, 3, 2.0)
    assert "rank 3 (stage 3): 2.00 x" in straggler.describe()


def record(folder: Any) -> dict[str, Any]:
    config = small_config()
    engine, grid = make_engine(config, pp=2, micro_batches=3)
    batches = make_batches(12, 2, 8, config.vocab_size)
    iterator = iter(my_batches(batches, grid, 3))
    engine.train_batch(iterator)
    with TimelineRecorder(engine) as recorder:
        engine.train_batch(iterator)
    recorded = recorder.events
    engine.train_batch(iterator)
    write_timeline(folder / "timeline", 2, grid.rank, grid.pipe_rank, recorded)
    with profiled(folder / "profile" / f"rank-{grid.rank}.json", engine.device):
        engine.train_batch(iterator)
    return {
        "names": [e.name for e in recorded],
        "after": len(recorder.events),
        "left": "_INSTRUCTION_MAP" in vars(engine),
    }


def test_a_recorded_step(pool: Any, tmp_path: Any) -> None:
    for stage, got in enumerate(pool.run(record, 2, tmp_path, timeout=120)):
        assert got["names"] == streams(2, 3)[stage]
        assert got["after"] == len(got["names"]) and not got["left"], "a step without the recorder is not recorded"
    assert timeline_steps(tmp_path / "timeline") == [2]
    ranks = read_timeline(tmp_path / "timeline", 2)
    assert {rank: stage for rank, (stage, _) in ranks.items()} == {0: 0, 1: 1}
    for _, events in ranks.values():
        assert [e.micro_batch for e in events if e.name == "ForwardPass"] == [0, 1, 2]
        assert all(0 <= a.start <= a.end <= b.start + 1e-9 for a, b in zip(events, events[1:], strict=False))
    trace = json.loads((tmp_path / "profile" / "rank-0.json").read_text())
    assert any("mm" in str(event.get("name")) for event in trace["traceEvents"])
