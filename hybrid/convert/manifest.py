"""What makes a directory a complete checkpoint: the manifest, written last, with layout, sizes and checksums."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybrid.config.errors import shown
from hybrid.convert.checksum import ALGORITHM
from hybrid.convert.errors import CheckpointError

MANIFEST = "manifest.json"

TRAINING_FILE = "training.json"
"""How far a run had come and its configuration, in a training checkpoint."""

SHARDED = "hybrid-llama safetensors"
"""Safetensors files whose headers say which slice of which Hugging Face tensor each tensor is."""

DEEPSPEED = "hybrid-llama deepspeed layers"
"""DeepSpeed's layer_XX-model_YY-model_states.pt, with this package's parameters."""

LAYOUT_VERSION = 1
"""Of what the tensors of a file mean. To be raised whenever the same names and shapes would mean something else."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the model is cut."""

    tensor_model_parallel_size: int
    layers_per_stage: tuple[int, ...]

    @property
    def pipeline_model_parallel_size(self) -> int:
        return len(self.layers_per_stage)

    def __str__(self) -> str:
        stages = " + ".join(map(str, self.layers_per_stage))
        return (
            f"tensor {self.tensor_model_parallel_size} x pipeline {self.pipeline_model_parallel_size} ({stages} layers)"
        )


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What a file has to be."""

    size: int
    """Bytes."""
    checksum: str
    """Of the whole file, or of a safetensors file's header."""
    tensors: dict[str, str] = field(default_factory=dict)
    """Checksums of a safetensors file's tensors."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of manifest.json."""

    format: str
    layout: Layout
    vocab_size: int
    """Rows of the embedding, without padding."""
    padded_vocab_size: int
    """Rows that the layout's ranks hold in all. Only the DeepSpeed format stores them."""
    dtype: str
    """Of the weights, or of most of their bytes."""
    files: dict[str, FileRecord]
    """Every other file of the directory that belongs to the checkpoint."""

    def to_json(self) -> str:
        """The file's text."""
        layout = {**asdict(self.layout), "pipeline_model_parallel_size": self.layout.pipeline_model_parallel_size}
        files = {name: _without_empty(asdict(record)) for name, record in self.files.items()}
        head = {"format": self.format, "layout_version": LAYOUT_VERSION, "checksum_algorithm": ALGORITHM}
        return json.dumps({**head, **asdict(self), "layout": layout, "files": files}, indent=1) + "\n"


def _without_empty(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if value != {}}


def is_manifest(path: Path) -> bool:
    """Whether a directory has a manifest at all."""
    return (path / MANIFEST).is_file()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a directory.

    Raises:
        CheckpointError: it is not one of a format, layout version and checksum this package knows.
    """
    path = directory / MANIFEST
    try:
        raw = json.loads(path.read_text())
        if not isinstance(raw, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError) as error:
        raise CheckpointError([f"it cannot be read as JSON: {error}"], str(path)) from None
    known: dict[str, tuple[Any, ...]] = {
        "format": (SHARDED, DEEPSPEED),
        "layout_version": (LAYOUT_VERSION,),
        "checksum_algorithm": (ALGORITHM,),
    }
    foreign = [
        f"{key} is {shown(raw.get(key))}, this package reads {' and '.join(map(shown, values))}: tensors of another "
        "layout can have the same names and shapes, so none is read; convert it with the package that wrote it"
        for key, values in known.items()
        if raw.get(key) not in values
    ]
    if foreign:
        raise CheckpointError(foreign, str(path))
    try:
        return Manifest(
            format=raw["format"],
            layout=Layout(
                tensor_model_parallel_size=raw["layout"]["tensor_model_parallel_size"],
                layers_per_stage=tuple(raw["layout"]["layers_per_stage"]),
            ),
            vocab_size=raw["vocab_size"],
            padded_vocab_size=raw["padded_vocab_size"],
            dtype=raw["dtype"],
            files={name: FileRecord(**record) for name, record in raw["files"].items()},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            [f"it is not a manifest of this package: {type(error).__name__} {error}"], str(path)
        ) from None


def file_problems(directory: Path, manifest: Manifest) -> list[str]:
    """Files that are missing or have another size."""
    problems = []
    for name, record in manifest.files.items():
        path = directory / name
        if not path.is_file():
            problems.append(f"{name} is missing: the manifest lists it")
        elif (size := path.stat().st_size) != record.size:
            problems.append(
                f"{name} has {size:,} bytes, the manifest says {record.size:,}: it is damaged or half copied"
            )
    return problems
