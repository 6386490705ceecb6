"""Reads a Hugging Face checkpoint into the sharded model: each rank takes only the slices it holds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from hybrid.config.model import LlamaConfig
from hybrid.convert.names import hf_shapes
from hybrid.tensor_parallel.params import Segment, named_segments

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def tensor_files(directory: Path) -> dict[str, Path]:
    """The file of every tensor in a Hugging Face directory.

    Raises:
        FileNotFoundError: there are no safetensors, or one that the index names is missing.
    """
    if (directory / INDEX).exists():
        weight_map: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
        missing = sorted({name for name in weight_map.values() if not (directory / name).exists()})
        if missing:
            raise FileNotFoundError(f"{directory / INDEX} names files that are not there: {', '.join(missing)}")
        return {tensor: directory / name for tensor, name in weight_map.items()}
    path = directory / SINGLE
    if not path.exists():
        raise FileNotFoundError(f"{directory} holds neither {SINGLE} nor {INDEX}: is it a Hugging Face checkpoint?")
    with safe_open(path, framework="pt") as file:
        return {tensor: path for tensor in file.keys()}


def check_tensors(files: dict[str, Path], config: LlamaConfig) -> None:
    """Compare the names on disk with the model's.

    Raises:
        ValueError: tensors are missing or not the model's; lists them all.
    """
    wanted = hf_shapes(config).keys()
    # Buffers that old versions of transformers saved, and the copy of a tied head: nothing is lost without them.
    harmless = {name for name in files if name.endswith("rotary_emb.inv_freq")}
    if config.tie_word_embeddings:
        harmless.add("lm_head.weight")
    missing, unexpected = sorted(wanted - files.keys()), sorted(files.keys() - wanted - harmless)
    problems = [f"missing: {name}" for name in missing] + [f"unexpected: {name}" for name in unexpected]
    if problems:
        raise ValueError("the checkpoint is not of this model:\n  " + "\n  ".join(problems))


@torch.no_grad()
def load_hf(module: torch.nn.Module, config: LlamaConfig, directory: Path) -> None:
    """Fill the module's parameters from a Hugging Face directory.

    Raises:
        FileNotFoundError: files are missing.
        ValueError: names or shapes are not the model's.
    """
    files = tensor_files(directory)
    check_tensors(files, config)
    by_file: dict[Path, list[tuple[torch.Tensor, Segment]]] = {}
    for param, segment in named_segments(module):
        if segment.shard.length:
            by_file.setdefault(files[segment.hf_name], []).append((param, segment))
    for path, slices in by_file.items():
        with safe_open(path, framework="pt") as file:
            for param, segment in slices:
                source = file.get_slice(segment.hf_name)
                if tuple(source.get_shape()) != segment.hf_shape:
                    raise ValueError(
                        f"{path}: {segment.hf_name} has shape {tuple(source.get_shape())}, "
                        f"the model needs {segment.hf_shape}"
                    )
                param[segment.local] = source[segment.source].to(param.device)
