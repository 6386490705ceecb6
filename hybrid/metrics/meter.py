"""Counts the bytes a step moves, by collective and by axis of the process grid."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid.collectives import exchange_meaning
from hybrid.grid import Grid

_NAMES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "broadcast_": "broadcast",
    "send": "send",
}
"""c10d operators that put bytes on the wire. A receive is the other end of a send and counts there; an all-to-all is
what it stands for (hybrid/collectives.py).
"""

_RING_PASSES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda size: 2 * (size - 1) / size,
    "all_gather": lambda size: (size - 1) / size,
    "reduce_scatter": lambda size: (size - 1) / size,
    "broadcast": lambda size: 1.0,
    "send": lambda size: 1.0,
}


@dataclass(frozen=True)
class Call:
    """One collective or send of this rank."""

    op: str
    axis: str
    """`tensor`, `data`, `pipe`, `embedding`, `kv`, or `world`."""
    group_size: int
    payload: int
    """Bytes of the whole tensor: the input of a reduction, the output of a gather."""
    dtype: torch.dtype

    @property
    def wire_bytes(self) -> float:
        """Bytes this rank sends, with ring algorithms (Thakur et al. 2005)."""
        return _RING_PASSES[self.op](self.group_size) * self.payload


class TrafficMeter(TorchDispatchMode):
    """Records every collective that is issued while the meter is entered, DeepSpeed's and autograd's included."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.calls: list[Call] = []
        groups = {
            "kv": grid.kv_group,
            "embedding": grid.embedding_group,
            "tensor": grid.tensor_group,
            "data": grid.data_group,
            "pipe": grid.pipe_group,
        }
        self._axes = {group.group_name: axis for axis, group in groups.items() if group is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            op = exchange_meaning(args[0]) if name == "alltoall_base_" else _NAMES.get(name)
            if op is not None:
                self._record(op, args)
        return func(*args, **(kwargs or {}))

    def _record(self, op: str, args: Any) -> None:
        group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
        tensors = [t for arg in args for t in _tensors(arg)]
        largest = max(tensors, key=lambda tensor: tensor.nbytes)
        axis = "pipe" if op == "send" else self._axes.get(group.group_name, "world")
        self.calls.append(Call(op, axis, group.size(), largest.nbytes, largest.dtype))


def _tensors(arg: Any) -> Iterable[torch.Tensor]:
    if isinstance(arg, torch.Tensor):
        return [arg]
    if isinstance(arg, (list, tuple)):
        return [tensor for item in arg for tensor in _tensors(item)]
    return []


def summarize(calls: Iterable[Call]) -> dict[str, dict[str, dict[str, int]]]:
    """axis -> op -> `{"calls", "payload_bytes", "wire_bytes"}`."""
    summary: dict[str, dict[str, dict[str, int]]] = {}
    for call in calls:
        entry = summary.setdefault(call.axis, {}).setdefault(call.op, {"calls": 0, "payload_bytes": 0, "wire_bytes": 0})
        entry["calls"] += 1
        entry["payload_bytes"] += call.payload
        entry["wire_bytes"] += round(call.wire_bytes)
    return summary
