"""Writes DeepSpeed's native layer files, for tools that expect them; one layer of one rank is in memory at a time."""

from __future__ import annotations

import torch

from hybrid.convert.common import Job, Result, Weights, prepared, write_companions
from hybrid.convert.files import staged
from hybrid.convert.layers import layer_file, layer_tensors
from hybrid.convert.manifest import DEEPSPEED, FileRecord, Layout
from hybrid.convert.names import Layer, Param
from hybrid.convert.parallel import Check, run_all
from hybrid.convert.sharded import complete, make_manifest, whole_file
from hybrid.convert.sources import Checkpoint


def write_native(source: Checkpoint, layout: Layout, job: Job) -> Result:
    """Write a checkpoint of any kind as `layer_XX-model_YY-model_states.pt`, as PipelineModule would save it.

    The layout's stages leave no trace in it: any pipeline reads it, but only the same tensor-parallel size.

    Raises:
        ConfigError: the source is not fit, or cannot be written there; then nothing is.
    """
    weights = prepared(source, job)
    tp_size = layout.tensor_model_parallel_size
    layers = {
        (tp_rank, index): layer
        for tp_rank in range(tp_size)
        for index, layer in layer_tensors(weights.config, tp_size, tp_rank)
    }
    with staged(job.output, overwrite=job.overwrite, size=weights.nbytes) as staging:
        records: dict[str, FileRecord] = {}

        def convert(place: tuple[int, int], check: Check) -> None:
            check()
            tp_rank, index = place
            path = staging / layer_file(index, tp_rank)
            tensors = _assemble(weights, layers[place])
            torch.save(tensors, path)
            records[path.name] = whole_file(path)
            job.progress(sum(tensor.nbytes for tensor in tensors.values()))

        run_all(convert, layers, job.workers)
        companions = write_companions(source.path, staging, weights.config, weights.main_dtype)
        records |= {name: whole_file(staging / name) for name in companions}
        ordered = dict(sorted(records.items()))
        complete(staging, make_manifest(weights.config, layout, weights.main_dtype, DEEPSPEED, ordered))
    return weights.result(files=len(layers))


def _assemble(weights: Weights, layer: Layer) -> dict[str, torch.Tensor]:
    """The parameters of a layer, padding rows zero."""
    return {param.name: _parameter(weights, param) for param in layer}


def _parameter(weights: Weights, param: Param) -> torch.Tensor:
    dtype = weights.dtypes[param.segments[0].hf_name]
    result = torch.zeros(param.shape, dtype=dtype)
    for segment in param.segments:
        result[segment.local] = weights.store.read(weights.sources[segment.hf_name], segment.source).to(dtype)
    return result
