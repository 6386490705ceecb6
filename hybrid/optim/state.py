"""What a rank's optimizer holds, piece by piece: to be saved, and to be filled in again under any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from hybrid.optim.distributed import DistributedOptimizer
from hybrid.optim.layout import Piece

MASTER = "master"
"""The kind of the fp32 weights; the other kinds are the inner optimizer's names for its states."""

_STEP = "step"

Fill = Callable[[str, nn.Parameter, Piece, torch.Tensor], None]
"""Writes the values of (kind, parameter, piece) into a flat fp32 tensor that is zero where the model has padding."""


def named_state(optimizer: DistributedOptimizer) -> Iterator[tuple[str, Piece, torch.Tensor]]:
    """(kind, piece, flat fp32 tensor) of everything this rank owns."""
    for piece, master in zip(optimizer.pieces, optimizer.masters, strict=True):
        yield MASTER, piece, master.detach()
        for kind, value in optimizer.inner.state.get(master, {}).items():
            if torch.is_tensor(value) and value.numel() == piece.numel and kind != _STEP:
                yield kind, piece, value


@torch.no_grad()
def restore_state(optimizer: DistributedOptimizer, kinds: Sequence[str], updates: int, fill: Fill) -> None:
    """Fill masters and states anew; `write_back` then brings the masters into the parameters of every rank.

    Args:
        kinds: states the inner optimizer had, besides the masters.
        updates: steps it had taken, for Adam's bias correction.
    """
    counts = isinstance(optimizer.inner, torch.optim.Adam | torch.optim.AdamW)
    for piece, master in zip(optimizer.pieces, optimizer.masters, strict=True):
        param = optimizer.params[piece.index]
        fill(MASTER, param, piece, master.detach())
        state = optimizer.inner.state[master]
        state.clear()
        if kinds and counts:
            state[_STEP] = torch.tensor(float(updates), dtype=torch.float32, device=master.device)
        for kind in kinds:
            state[kind] = torch.zeros_like(master)
            fill(kind, param, piece, state[kind])


@torch.no_grad()
def whole_masters(optimizer: DistributedOptimizer) -> Callable[[nn.Parameter], torch.Tensor]:
    """A function that gives a trained parameter in fp32, whole; a collective call over the data-parallel ranks.

    It holds 4 bytes a trained parameter: of a whole model, save a checkpoint instead.
    """
    optimizer.refresh_changed()
    masters = [master.detach() for master in optimizer.masters]
    flats = optimizer.parameters.whole(optimizer.pieces, masters)
    values = {id(param): flat.view(param.shape) for param, flat in zip(optimizer.params, flats, strict=True)}
    return lambda param: values[id(param)]


def memory_bytes(optimizer: DistributedOptimizer) -> dict[str, int]:
    """Bytes this rank holds between steps, padding included.

    `parameters`, `frozen` (those not trained), `gradients`, `states` and `buckets`.
    """
    # The masters of an fp32 model are the parameters.
    shared = optimizer.dtype == torch.float32
    states = sum(tensor.nbytes for kind, _, tensor in named_state(optimizer) if not (shared and kind == MASTER))
    return {
        "parameters": optimizer.parameters.nbytes,
        "frozen": optimizer.frozen_nbytes,
        "gradients": optimizer.gradients.nbytes,
        "states": states,
        "buckets": optimizer.gradients.buffer_nbytes,
    }
