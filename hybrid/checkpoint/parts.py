"""Which tensors of a rank a checkpoint holds, and how they are filled in again under another layout."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from hybrid.checkpoint.boxes import TensorBox, tensor_boxes
from hybrid.convert.errors import CheckpointError, listed
from hybrid.convert.names import is_state_key, state_key
from hybrid.convert.store import TensorStore
from hybrid.grid import Grid
from hybrid.optim.distributed import DistributedOptimizer
from hybrid.optim.layout import Piece
from hybrid.optim.state import MASTER, named_state, restore_state
from hybrid.tensor_parallel.params import param_spec


@dataclass(frozen=True, kw_only=True)
class Part:
    """A rectangle of a named tensor, to be written."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    data: torch.Tensor
    """Flat, contiguous."""
    file: int
    """Which of the rank's files it goes to: torch.distributed.checkpoint reads one rectangle of a name from a file."""


def saved_parts(optimizer: DistributedOptimizer, module: nn.Module, grid: Grid) -> list[Part]:
    """What this rank writes: over all ranks, every element of weights and states once. The weights must be at rest."""
    optimizer.refresh_changed()
    parts: list[Part] = []
    if optimizer.layout.num_shards > 1 or grid.data_rank == 0:
        for kind, piece, flat in _pieces(optimizer):
            parts += _cut(kind, optimizer.params[piece.index], piece.start, piece.stop, flat, grid)
    if grid.data_rank == 0:
        for param in _frozen(optimizer, module):
            parts += _cut(None, param, 0, param.numel(), param.detach().flatten(), grid)
    return parts


def _pieces(optimizer: DistributedOptimizer) -> Iterator[tuple[str | None, Piece, torch.Tensor]]:
    """(state, piece, values); no state is the weight itself, which in an fp32 model is the master too."""
    weights_are_masters = optimizer.dtype == torch.float32
    for kind, piece, flat in named_state(optimizer):
        if kind == MASTER:
            yield None, piece, optimizer.parameters.view(piece)
        if kind != MASTER or not weights_are_masters:
            yield kind, piece, flat


def _frozen(optimizer: DistributedOptimizer, module: nn.Module) -> list[nn.Parameter]:
    trained = {id(param) for param in optimizer.params}
    return [param for param in module.parameters() if id(param) not in trained]


def _cut(
    kind: str | None, param: nn.Parameter, start: int, stop: int, flat: torch.Tensor, grid: Grid
) -> Iterator[Part]:
    spec = param_spec(param)
    if spec.tied and grid.embedding_group is not None and not grid.is_first_stage:
        return
    owned = [segment for segment in spec.segments if segment.shard.owner]
    files: Counter[str] = Counter()
    for box in tensor_boxes(owned, param.shape, start, stop):
        name = box.segment.hf_name
        data = flat[box.start - start : box.stop - start]
        yield Part(key=_key(name, kind), offset=box.offset, shape=box.shape, data=data, file=files[name])
        files[name] += 1


def _key(hf_name: str, kind: str | None) -> str:
    return hf_name if kind is None else state_key(hf_name, kind)


def saved_kinds(store: TensorStore) -> list[str]:
    """The states of the inner optimizer that a checkpoint holds."""
    kinds = {key.rpartition(".")[2] for key in store.tensors if is_state_key(key)}
    return sorted(kinds - {MASTER})


def check_states(
    store: TensorStore, trained: Mapping[str, tuple[int, ...]], frozen: Mapping[str, tuple[int, ...]] | None = None
) -> None:
    """Look whether every weight is there and whole, and of those that are trained every state.

    Raises:
        CheckpointError: names what is missing or has another shape.
    """
    kinds = saved_kinds(store)
    masters = any(key.endswith(f".{MASTER}") for key in store.tensors if is_state_key(key))
    problems, missing = [], []
    states = [*kinds, *([MASTER] if masters else [])]
    for name, shape in {**trained, **(frozen or {})}.items():
        for key in [name, *(state_key(name, kind) for kind in states if name in trained)]:
            tensor = store.tensors.get(key)
            if tensor is None:
                missing.append(key)
            elif tensor.shape != shape:
                problems.append(f"{key} has shape {list(tensor.shape)}, the model needs {list(shape)}")
            elif (held := sum(math.prod(piece.shape) for piece in tensor.pieces)) != math.prod(shape):
                problems.append(f"{key}: its slices hold {held:,} of {math.prod(shape):,} elements")
    if missing:
        problems.insert(0, f"missing: {listed(missing)}")
    if problems:
        raise CheckpointError(problems, "the checkpoint")


@torch.no_grad()
def load_parts(optimizer: DistributedOptimizer, module: nn.Module, store: TensorStore, updates: int) -> None:
    """Fill this rank's masters and states from a checkpoint of any layout.

    Args:
        updates: steps the inner optimizer had taken.
    """

    def fill(kind: str, param: nn.Parameter, piece: Piece, flat: torch.Tensor) -> None:
        for box in tensor_boxes(param_spec(param).segments, param.shape, piece.start, piece.stop):
            key = _key(box.segment.hf_name, kind)
            if kind == MASTER and key not in store:
                key = box.segment.hf_name  # saved in fp32, where the weight is the master
            _copy(store, key, box, flat[box.start - piece.start : box.stop - piece.start])

    restore_state(optimizer, saved_kinds(store), updates, fill)
    for param in _frozen(optimizer, module):
        flat = param.detach().flatten()
        for box in tensor_boxes(param_spec(param).segments, param.shape, 0, param.numel()):
            _copy(store, box.segment.hf_name, box, flat[box.start : box.stop])
        param.copy_(flat.view_as(param))


def _copy(store: TensorStore, key: str, box: TensorBox, out: torch.Tensor) -> None:
    out.copy_(store.read(key, box.index).flatten())
