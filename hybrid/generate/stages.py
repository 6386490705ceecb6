"""The stages of a pipeline run forward only, one after the other, without an engine or an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid.grid import Grid
from hybrid.pipeline.module import LlamaPipeline
from hybrid.tensor_parallel.context import TensorParallel

Batch = tuple[Tensor, ...]
"""Token ids and shifted labels, of packed documents also positions and segment numbers; each [b, s] int64."""


def stage_rank(grid: Grid, stage: int) -> int:
    """The rank of another stage of this pipeline, at this rank's place."""
    return int(grid.topology.get_rank(pipe=stage, data=grid.data_rank, model=grid.tensor_rank))


def receive_hidden(grid: Grid, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The hidden states the stage before this one sends."""
    hidden = torch.empty(shape, dtype=like.dtype, device=like.device)
    dist.recv(hidden, stage_rank(grid, grid.pipe_rank - 1))
    return hidden


def send_hidden(grid: Grid, hidden: Tensor) -> None:
    """Hidden states to the next stage."""
    dist.send(hidden.contiguous(), stage_rank(grid, grid.pipe_rank + 1))


@contextmanager
def whole_sequences(module: nn.Module) -> Iterator[None]:
    """No sequence parallelism inside the block: a single token cannot be cut."""
    layers: list[Any] = [m for m in module.modules() if isinstance(getattr(m, "tp", None), TensorParallel)]
    contexts = [layer.tp for layer in layers]
    try:
        for layer, context in zip(layers, contexts, strict=True):
            layer.tp = replace(context, sequence_parallel=False)
        yield
    finally:
        for layer, context in zip(layers, contexts, strict=True):
            layer.tp = context


@torch.no_grad()
def evaluate_loss(module: LlamaPipeline, grid: Grid, batches: Iterable[Batch]) -> tuple[float, int]:
    """(mean loss, supervised tokens) over the batches of all data-parallel ranks; a collective call.

    Every stage is given as many batches, of one shape: the first takes tokens and segment numbers from them, the last
    the labels. A stage goes on to the next batch as soon as it has sent its own on.
    """
    like = next(module.parameters())
    totals = torch.zeros(2, dtype=torch.float64, device=like.device)
    module.eval()
    for tokens, labels, *packing in batches:
        (b, s), x = tokens.shape, tokens.to(like.device)
        segments = packing[1].int().to(like.device) if packing else None
        if not grid.is_first_stage:
            rows = s // module.tp.size if module.tp.sequence_sharded else s
            x = receive_hidden(grid, (rows, b, module.config.hidden_size), like)
            if segments is not None:
                dist.recv(segments, stage_rank(grid, grid.pipe_rank - 1))
        outputs = module(x if segments is None else (x, segments))
        if grid.is_last_stage:
            loss, count = module.loss_fn(outputs, labels.to(like.device))
            totals += torch.stack([loss.double(), count.double()])
        else:
            send_hidden(grid, outputs[0] if isinstance(outputs, tuple) else outputs)
            if segments is not None:
                dist.send(segments, stage_rank(grid, grid.pipe_rank + 1))
    module.train()
    if grid.tensor_rank != 0:
        totals.zero_()
    if grid.world_size > 1:
        dist.all_reduce(totals)
    loss_sum, count = totals.tolist()
    return loss_sum / max(count, 1), int(count)
