"""Writes the model, from whatever layout, as a Hugging Face directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from hybrid.config.model import LlamaConfig
from hybrid.convert.names import hf_shapes
from hybrid.grid import Grid
from hybrid.tensor_parallel.params import Segment, named_segments

MAX_SHARD_BYTES = 5 * 10**9
"""Largest safetensors file, as transformers writes them."""

SaveTokenizer = Callable[[Path], object]
"""Writes the tokenizer's files into a folder."""


@dataclass(frozen=True)
class _Part:
    """One rank's slice of a Hugging Face tensor."""

    rank: int
    segment: Segment


def export_hf(
    module: torch.nn.Module, grid: Grid, config: LlamaConfig, directory: Path, save_tokenizer: SaveTokenizer | None = None
) -> None:
    """Write `directory` with config, safetensors and tokenizer; a collective call, the weights at rest.

    Rank 0 receives one tensor after the other and writes a file whenever it holds `MAX_SHARD_BYTES`: no rank ever holds
    the whole of a large model. The directory is written beside its place and renamed when it is complete.
    """
    parts = _gather_parts(module, grid)
    local = {segment.hf_name: param.detach()[segment.local] for param, segment in named_segments(module)}
    tensors = _collect(parts, local, hf_shapes(config), grid)
    if grid.rank != 0:
        for _ in tensors:
            pass
    else:
        dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
        staging = directory.with_name(f".{directory.name}.writing")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        _write_shards(staging, tensors)
        _write_json(staging / "config.json", config.to_hf(dtype))
        generation = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
        _write_json(staging / "generation_config.json", generation)
        if save_tokenizer is not None:
            save_tokenizer(staging)
        if directory.exists():
            shutil.rmtree(directory)
        staging.rename(directory)
    if grid.world_size > 1:
        dist.barrier()


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
    parts: dict[str, list[_Part]], local: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]], grid: Grid
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor whole on rank 0; the other ranks send their slices and yield nothing of use."""
    for name, shape in shapes.items():
        whole: torch.Tensor | None = None
        for part in parts[name]:
            if part.rank == grid.rank and grid.rank != 0:
                dist.send(local[name].contiguous(), 0)
            elif grid.rank == 0:
                like = next(iter(local.values()))
                if part.rank == 0:
                    piece = local[name]
                else:
                    piece = torch.empty(part.segment.local_shape, dtype=like.dtype, device=like.device)
                    dist.recv(piece, part.rank)
                if whole is None:
                    whole = torch.empty(shape, dtype=like.dtype)
                whole[part.segment.source] = piece.cpu()
        yield name, whole if whole is not None else torch.empty(0)


def _write_shards(directory: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Files of at most `MAX_SHARD_BYTES`, with an index where there are several."""
    files: list[tuple[Path, list[str]]] = []
    held: dict[str, torch.Tensor] = {}
    total = 0

    def flush() -> None:
        path = directory / f"part-{len(files)}"
        save_file(held, path, metadata={"format": "pt"})
        files.append((path, list(held)))
        held.clear()

    for name, tensor in tensors:
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > MAX_SHARD_BYTES:
            flush()
        held[name] = tensor
        total += tensor.nbytes
    flush()
    if len(files) == 1:
        files[0][0].rename(directory / "model.safetensors")
        return
    weight_map = {}
    for number, (path, names) in enumerate(files, start=1):
        final = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        path.rename(directory / final)
        weight_map.update({name: final for name in names})
    _write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
