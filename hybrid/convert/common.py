"""What every conversion does before it writes: checks, dtypes, and what is said about the result."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from hybrid.config.model import LlamaConfig
from hybrid.convert.adapters import with_merged_adapters
from hybrid.convert.compare import first_difference
from hybrid.convert.errors import CheckpointError
from hybrid.convert.files import check_target, copy_companions, highest_token_id, write_json
from hybrid.convert.integrity import check_bytes
from hybrid.convert.names import EMBEDDING, HEAD, hf_shapes, state_key
from hybrid.convert.replace import check_replaceable
from hybrid.convert.sources import Checkpoint, weight_problems
from hybrid.convert.store import TensorStore
from hybrid.convert.writer import Progress

DTYPE_NAMES = {
    **{"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16},
    **{"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16},
}


def dtype_name(dtype: torch.dtype) -> str:
    """As config.json has it."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Where to write, and how."""

    output: Path
    dtype: torch.dtype | None = None
    """Of the tensors written; None keeps each as it is."""
    workers: int = 1
    overwrite: bool = False
    checksums: bool = False
    """First read every byte of a source whose manifest has checksums, and compare."""
    progress: Progress = lambda written: None


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was written."""

    files: int
    nbytes: int
    ignored: list[str]
    """Tensors of the source that the model does not need."""
    masters: bool
    """The weights come from the fp32 masters of a training checkpoint."""
    merged: bool
    """Adapters were merged into them."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A checkpoint's weights, checked, with the key and dtype each is to be taken from and written in."""

    config: LlamaConfig
    store: TensorStore
    sources: dict[str, str]
    dtypes: dict[str, torch.dtype]
    ignored: list[str]
    masters: bool
    merged: bool

    @property
    def nbytes(self) -> int:
        """Of all tensors as they are written."""
        return sum(
            self.store.tensors[key].nbytes // self.store.tensors[key].dtype.itemsize * self.dtypes[name].itemsize
            for name, key in self.sources.items()
        )

    def result(self, files: int) -> Result:
        """What is said when they are written to so many files."""
        return Result(files=files, nbytes=self.nbytes, ignored=self.ignored, masters=self.masters, merged=self.merged)

    @property
    def main_dtype(self) -> str:
        """The dtype of most bytes, as config.json has it."""
        sizes: Counter[torch.dtype] = Counter()
        for name, key in self.sources.items():
            sizes[self.dtypes[name]] += self.store.tensors[key].nbytes
        return dtype_name(sizes.most_common(1)[0][0])


def prepared(source: Checkpoint, job: Job) -> Weights:
    """The weights to be written, once source and output are found fit.

    Raises:
        ConfigError: lists what is wrong.
    """
    check_target(job.output, overwrite=job.overwrite)
    if job.overwrite:
        check_replaceable(job.output, source.path)
    weights = checked_weights(source, job.dtype)
    if job.checksums and source.manifest is not None:
        check_bytes(source.path, source.manifest, job.workers)
    return weights


def checked_weights(source: Checkpoint, dtype: torch.dtype | None) -> Weights:
    """The weights of a checkpoint that is fit for conversion; of adapters, with these merged.

    Raises:
        ConfigError: lists all that is wrong with it.
    """
    config = source.config()
    merged = with_merged_adapters(source, torch.float32)  # rounded once, to what is written
    store = merged.store
    problems, ignored = weight_problems(store, config)
    if not problems and config.tie_word_embeddings and HEAD in store:
        problems += tied_head_problems(store)
    problems += vocabulary_problems(source.path, config)
    if source.manifest is not None and source.manifest.vocab_size != config.vocab_size:
        problems.append(
            f"config.json has vocab_size {config.vocab_size}, the manifest {source.manifest.vocab_size}: one was edited"
        )
    if problems:
        raise CheckpointError(problems, str(source.path))
    names = hf_shapes(config)
    masters = dtype == torch.float32 and all(state_key(name, "master") in store for name in names)
    sources = {name: state_key(name, "master") if masters else name for name in names}
    return Weights(
        config=config,
        store=store,
        sources=sources,
        dtypes={name: dtype or source.store.tensors[name].dtype for name in names},
        ignored=ignored,
        masters=masters,
        merged=merged is not source,
    )


def tied_head_problems(store: TensorStore) -> list[str]:
    """Whether a head that lies beside the embedding of a tied model is its copy."""
    if (place := first_difference(store, HEAD, store, EMBEDDING)) is None:
        return []
    return [
        f"tie_word_embeddings is true, but {HEAD} is not {EMBEDDING} ({place}): set tie_word_embeddings to false in "
        "its config.json, or remove the tensor"
    ]


def vocabulary_problems(path: Path, config: LlamaConfig) -> list[str]:
    """Whether the tokenizer beside the weights has tokens the model has no row for."""
    highest = highest_token_id(path)
    if highest is None or highest < config.vocab_size:
        return []
    return [
        f"the tokenizer beside it has the id {highest}, the model has vocab_size {config.vocab_size}: resize the model "
        f"(transformers' resize_token_embeddings({highest + 1})), or take the tokenizer's additions out"
    ]


def write_companions(source: Path, staging: Path, config: LlamaConfig, dtype: str) -> list[str]:
    """config.json, and a copy of what else lies beside the weights; the names of the files."""
    copied = copy_companions(source, staging)
    # Last: a folder without it is nowhere taken for a model.
    write_json(staging / "config.json", config.to_hf(dtype))
    return [*copied, "config.json"]
