"""Writes the model, from whatever layout, as a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from hybrid.agreement import together
from hybrid.config.model import LlamaConfig
from hybrid.convert.common import dtype_name
from hybrid.convert.files import staged, write_json
from hybrid.convert.hf import MAX_SHARD_BYTES, plan_shards, tensor_bytes, write_index
from hybrid.convert.names import hf_shapes
from hybrid.convert.store import raw_array
from hybrid.convert.writer import TensorFileWriter
from hybrid.grid import Grid
from hybrid.tensor_parallel.params import Segment, named_segments

SaveTokenizer = Callable[[Path], object]
"""Writes the tokenizer's files into a folder."""


Values = Callable[[torch.nn.Parameter, Segment], torch.Tensor]
"""This rank's slice of a segment as it is to be written."""


def stored_values(param: torch.nn.Parameter, segment: Segment) -> torch.Tensor:
    """The slice as it is."""
    return param.detach()[segment.local]


@dataclass(frozen=True)
class _Part:
    """One rank's slice of a Hugging Face tensor."""

    rank: int
    segment: Segment


def export_hf(
    module: torch.nn.Module,
    grid: Grid,
    config: LlamaConfig,
    directory: Path,
    save_tokenizer: SaveTokenizer | None = None,
    values: Values = stored_values,
) -> None:
    """Write `directory` with config, safetensors and tokenizer; a collective call, the weights at rest.

    Rank 0 receives one tensor after the other and writes it: no rank ever holds the whole of a model. The directory
    is written beside its place and put there when it is complete, instead of what was there before.

    Raises:
        CheckpointError: the disk is full, or the directory cannot be written; RemoteError on the other ranks.
    """
    shapes, dtype = hf_shapes(config), next(module.parameters()).dtype
    tensors = collected(module, grid, shapes, values, dtype)

    def write() -> None:
        try:
            if grid.rank == 0:
                sizes = tensor_bytes(shapes, dict.fromkeys(shapes, dtype))
                with staged(directory, overwrite=True, size=sum(sizes.values())) as staging:
                    _write_weights(staging, tensors, shapes, sizes, dtype)
                    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
                    write_json(staging / "generation_config.json", generation)
                    if save_tokenizer is not None:
                        save_tokenizer(staging)
                    write_json(staging / "config.json", config.to_hf(dtype_name(dtype)))
        finally:
            # Whatever happened here, the other ranks wait until their slices are taken.
            for _ in tensors:
                pass

    together(write)


def _write_weights(
    directory: Path,
    tensors: Iterator[tuple[str, torch.Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, int],
    dtype: torch.dtype,
) -> None:
    """Write the tensors, which come in the order of `shapes`."""
    shards = plan_shards(sizes, MAX_SHARD_BYTES)
    for file, names in shards.items():
        writer = TensorFileWriter(directory / file, [(name, dtype, shapes[name]) for name in names])
        try:
            for name in names:
                key, tensor = next(tensors)
                assert key == name, "tensors are collected in the model's order"
                writer.write(name, [raw_array(tensor)])
            writer.finish()
        finally:
            writer.close()
    write_index(directory, shards, sum(sizes.values()))


def collected(
    module: torch.nn.Module,
    grid: Grid,
    shapes: Mapping[str, tuple[int, ...]],
    values: Values,
    dtype: torch.dtype,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) for every name of `shapes`, whole on rank 0, where it is put together when its turn comes.

    A collective call, and every rank has to go through the whole of the result.

    Args:
        dtype: that of `values`.
    """
    return _collect(_gather_parts(module, grid), module, shapes, grid, values, dtype)


def _gather_parts(module: torch.nn.Module, grid: Grid) -> dict[str, list[_Part]]:
    """Who holds which slice of which tensor, each slice once."""
    mine: list[_Part] = []
    if grid.data_rank == 0:
        mine = [_Part(grid.rank, s) for _, s in named_segments(module) if s.shard.owner and s.shard.length]
    everyone: list[list[_Part]] = [mine]
    if grid.world_size > 1:
        everyone = [[] for _ in range(grid.world_size)]
        dist.all_gather_object(everyone, mine)
    parts: dict[str, list[_Part]] = {}
    for part in (part for parts_of_rank in everyone for part in parts_of_rank):
        known = parts.setdefault(part.segment.hf_name, [])
        # A tied embedding is held by two stages; the first to name a slice sends it.
        if all(other.segment.source != part.segment.source for other in known):
            known.append(part)
    return parts


def _collect(
    parts: dict[str, list[_Part]],
    module: torch.nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    grid: Grid,
    values: Values,
    dtype: torch.dtype,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor whole on rank 0; the other ranks send their slices and yield nothing of use."""
    local = {segment.hf_name: (param, segment) for param, segment in named_segments(module)}
    device = next(module.parameters()).device
    for name, shape in shapes.items():
        whole: torch.Tensor | None = None
        for part in parts[name]:
            if part.rank == grid.rank and grid.rank != 0:
                dist.send(values(*local[name]).contiguous(), 0)
            elif grid.rank == 0:
                if part.rank == 0:
                    piece = values(*local[name])
                else:
                    piece = torch.empty(part.segment.local_shape, dtype=dtype, device=device)
                    dist.recv(piece, part.rank)
                if whole is None:
                    whole = torch.empty(shape, dtype=dtype)
                whole[part.segment.source] = piece.cpu()
        yield name, whole if whole is not None else torch.empty(0)
