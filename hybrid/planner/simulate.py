"""A pipeline schedule played with given times for each stage, without a process: where a step's idle time lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One instruction of one stage, in simulated seconds."""

    name: str
    start: float
    end: float
    micro_batch: int


def simulate(streams: Sequence[Sequence[str]], seconds: Sequence[Mapping[str, float]]) -> list[list[Slot]]:
    """Play the instruction names of each rank of a pipeline; a receive waits for its send, in the order of sending.

    Args:
        streams: DeepSpeed's instructions by name, in order, stage after stage.
        seconds: what each instruction takes on each stage; 0 where it is not given.
    """
    clocks = [0.0] * len(streams)
    position = [0] * len(streams)
    sent: dict[tuple[str, int, int], float] = {}
    counts: list[dict[str, int]] = [{} for _ in streams]
    slots: list[list[Slot]] = [[] for _ in streams]
    moved = True
    while moved:
        moved = False
        for stage, stream in enumerate(streams):
            while position[stage] < len(stream):
                name = stream[position[stage]]
                index = counts[stage].get(name, 0)
                ready = _ready(name, stage, len(streams), index, sent)
                if ready is None:
                    break
                start = max(clocks[stage], ready)
                clocks[stage] = start + seconds[stage].get(name, 0.0)
                slots[stage].append(Slot(name=name, start=start, end=clocks[stage], micro_batch=index))
                sent[name, stage, index] = clocks[stage]
                counts[stage][name] = index + 1
                position[stage] += 1
                moved = True
    assert all(position[stage] == len(stream) for stage, stream in enumerate(streams)), "the schedule deadlocks"
    return slots


def _ready(name: str, stage: int, stages: int, index: int, sent: Mapping[tuple[str, int, int], float]) -> float | None:
    """When a stage may begin an instruction; None while what it waits for has not been sent.

    Interleaved, the last rank's neighbour is the first.
    """
    if name == "RecvActivation":
        return sent.get(("SendActivation", (stage - 1) % stages, index))
    if name == "RecvGrad":
        return sent.get(("SendGrad", (stage + 1) % stages, index))
    return 0.0
