"""Writes the sharded format: one safetensors file per (pipeline, tensor) rank, and the manifest that completes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hybrid.config.layout import balanced_split, pipeline_problems, tensor_problems
from hybrid.config.model import LlamaConfig
from hybrid.config.parallel import padded_vocab_size
from hybrid.config.training import HybridConfig
from hybrid.convert.checksum import file_checksum
from hybrid.convert.common import Job, Result, Weights, prepared, write_companions
from hybrid.convert.errors import CheckpointError
from hybrid.convert.files import staged, sync
from hybrid.convert.manifest import MANIFEST, SHARDED, FileRecord, Layout, Manifest
from hybrid.convert.names import owned_segments
from hybrid.convert.sources import Checkpoint
from hybrid.convert.store import box_of
from hybrid.convert.writer import Slice, write_files

_SPLIT_SEQUENCE = 4096
"""Tokens for which a stage's share of layers is balanced where no split is given; any other split reads it as well."""


def rank_file(pp_rank: int, tp_rank: int) -> str:
    """The file with the slices of a rank."""
    return f"model-pp{pp_rank:02d}-tp{tp_rank:02d}.safetensors"


def plan_layout(config: LlamaConfig, tp: int, pp: int, split: Sequence[int] | None = None) -> Layout:
    """The layout for a model.

    Raises:
        CheckpointError: the model cannot be cut so; lists every reason, with the sizes that are possible.
    """
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    if too_small := [f"{key} is {size}: it must be at least 1" for key, size in sizes.items() if size < 1]:
        raise CheckpointError(too_small, "the layout")
    wanted = HybridConfig.model_validate({**sizes, "pipeline_split": None if split is None else list(split)})
    if problems := [*tensor_problems(wanted, config), *pipeline_problems(wanted, config)]:
        raise CheckpointError(problems, "the layout")
    stages = tuple(split) if split is not None else balanced_split(config, pp, _SPLIT_SEQUENCE)
    return Layout(tensor_model_parallel_size=tp, layers_per_stage=stages)


def plan_files(weights: Weights, layout: Layout) -> dict[str, list[Slice]]:
    """Which slices each rank's file holds: what the rank holds, each replicated slice with its owner only."""
    files = {}
    for pp_rank, tp_rank, segments in owned_segments(
        weights.config, layout.tensor_model_parallel_size, layout.layers_per_stage
    ):
        files[rank_file(pp_rank, tp_rank)] = [
            Slice(
                key=segment.hf_name,
                source=weights.sources[segment.hf_name],
                box=box_of(segment.source, segment.hf_shape),
                dtype=weights.dtypes[segment.hf_name],
            )
            for segment in segments
        ]
    return files


def make_manifest(config: LlamaConfig, layout: Layout, dtype: str, kind: str, files: dict[str, FileRecord]) -> Manifest:
    """The manifest of a model's directory."""
    return Manifest(
        format=kind,
        layout=layout,
        vocab_size=config.vocab_size,
        padded_vocab_size=padded_vocab_size(config.vocab_size, layout.tensor_model_parallel_size),
        dtype=dtype,
        files=files,
    )


def whole_file(path: Path) -> FileRecord:
    """What the manifest says of a file that is no safetensors file."""
    return FileRecord(size=path.stat().st_size, checksum=file_checksum(path))


def complete(staging: Path, manifest: Manifest) -> None:
    """Write the manifest, once all other files are on the disk."""
    for path in staging.rglob("*"):
        sync(path)
    (staging / MANIFEST).write_text(manifest.to_json())


def write_sharded(source: Checkpoint, layout: Layout, job: Job) -> Result:
    """Write a checkpoint of any kind in the sharded format.

    Raises:
        ConfigError: the source is not fit, or cannot be written there; then nothing is.
    """
    weights = prepared(source, job)
    with staged(job.output, overwrite=job.overwrite, size=weights.nbytes) as staging:
        files = write_files(
            staging,
            plan_files(weights, layout),
            weights.store,
            sharded=True,
            workers=job.workers,
            progress=job.progress,
        )
        companions = write_companions(source.path, staging, weights.config, weights.main_dtype)
        records = {**files, **{name: whole_file(staging / name) for name in companions}}
        complete(staging, make_manifest(weights.config, layout, weights.main_dtype, SHARDED, records))
    return weights.result(files=len(files))
