"""Writes a Hugging Face directory that transformers 4 and 5 load alike."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from hybrid.convert.common import Job, Result, prepared, write_companions
from hybrid.convert.errors import CheckpointError
from hybrid.convert.files import staged, write_json
from hybrid.convert.names import hf_shapes
from hybrid.convert.sources import INDEX, SINGLE, Checkpoint
from hybrid.convert.store import whole
from hybrid.convert.writer import Slice, write_files

MAX_SHARD_BYTES = 5 * 10**9
"""Largest file of weights, as transformers writes them."""

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Bytes of a size like `5GB` or `500MiB`.

    Raises:
        ValueError: it is not one.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is not a size like 5GB, 500MB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def plan_shards(sizes: Mapping[str, int], max_bytes: int) -> dict[str, list[str]]:
    """The files of a checkpoint and the tensors of each, in order; a tensor above `max_bytes` has its own."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if shards[-1] and held + size > max_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, start=1)}


def write_index(directory: Path, shards: Mapping[str, Sequence[str]], total_size: int) -> None:
    """The index beside several files of weights; none beside a single one."""
    if len(shards) > 1:
        weight_map = {name: file for file, names in shards.items() for name in names}
        write_json(directory / INDEX, {"metadata": {"total_size": total_size}, "weight_map": weight_map})


def tensor_bytes(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]) -> dict[str, int]:
    """Bytes of every tensor."""
    return {name: math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()}


def write_hf(source: Checkpoint, job: Job, max_shard_bytes: int = MAX_SHARD_BYTES) -> Result:
    """Write a checkpoint of any kind as a Hugging Face directory.

    Raises:
        ConfigError: the source is not fit, or cannot be written there; then nothing is.
    """
    if max_shard_bytes < 1:
        raise CheckpointError([f"max_shard_size is {max_shard_bytes}: it must be positive"], "the arguments")
    weights = prepared(source, job)
    shapes = hf_shapes(weights.config)
    shards = plan_shards(tensor_bytes(shapes, weights.dtypes), max_shard_bytes)
    files = {
        file: [Slice(key=n, source=weights.sources[n], box=whole(shapes[n]), dtype=weights.dtypes[n]) for n in names]
        for file, names in shards.items()
    }
    with staged(job.output, overwrite=job.overwrite, size=weights.nbytes) as staging:
        write_files(staging, files, weights.store, sharded=False, workers=job.workers, progress=job.progress)
        write_index(staging, shards, weights.nbytes)
        write_companions(source.path, staging, weights.config, weights.main_dtype)
    return weights.result(files=len(shards))
