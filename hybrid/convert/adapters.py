"""Adapters in a training checkpoint: what they are, and the weights with them merged, computed as they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from pydantic import ValidationError

from hybrid.config.training import LoraConfig
from hybrid.convert.errors import CheckpointError
from hybrid.convert.manifest import TRAINING_FILE
from hybrid.convert.names import hf_shapes, state_key
from hybrid.convert.sources import Checkpoint, weight_problems
from hybrid.convert.store import Piece, Raw, StoredTensor, TensorStore, raw_array
from hybrid.tensor_parallel.lora import adapter_name, is_adapter_name, low_rank_product, model_adapter_shapes

_MASTER = "master"


def stored_adapters(checkpoint: Checkpoint) -> LoraConfig | None:
    """The settings of the adapters a checkpoint holds, as its run was configured; None if it holds none.

    Raises:
        CheckpointError: it holds adapters, but does not say with what scale they count.
    """
    if not any(is_adapter_name(name) for name in checkpoint.store.tensors):
        return None
    path = checkpoint.path / TRAINING_FILE
    try:
        lora = json.loads(path.read_text(encoding="utf-8"))["config"]["hybrid"]["lora"]
        return LoraConfig.model_validate(lora)
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise CheckpointError(
            [
                f"it holds adapters, but hybrid.lora cannot be read from it ({type(error).__name__}), and r and alpha "
                "are needed to merge them: copy the whole folder of the checkpoint again"
            ],
            str(path),
        ) from None


def adapter_shapes(checkpoint: Checkpoint, lora: LoraConfig | None) -> dict[str, tuple[int, ...]]:
    """Name to shape of the matrices that adapters of these settings have on the checkpoint's model."""
    return {} if lora is None else model_adapter_shapes(hf_shapes(checkpoint.config()), lora.r, lora.targets)


def with_merged_adapters(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> Checkpoint:
    """The checkpoint with W + alpha / r B A in place of W, A and B; the same one if it has no adapters.

    Only headers are read here. The sum is computed in fp32 for the elements that are read, from the masters of A and B
    where the checkpoint has them.

    Args:
        dtype: of the merged weights; None rounds each to what the stored weight has.

    Raises:
        CheckpointError: a weight or a matrix is missing, has another shape or is not whole.
    """
    lora = stored_adapters(checkpoint)
    if lora is None:
        return checkpoint
    store, shapes = checkpoint.store, adapter_shapes(checkpoint, lora)
    problems, _ = weight_problems(store, checkpoint.config(), shapes)
    masters = {name: state_key(name, _MASTER) for name in shapes if state_key(name, _MASTER) in store}
    for name, key in masters.items():
        if store.tensors[key].shape != shapes[name] or store.tensors[key].problem():
            problems.append(f"{key} is not the whole of a matrix {list(shapes[name])}: copy the checkpoint again")
    if problems:
        raise CheckpointError(problems, str(checkpoint.path))
    keys = {name: masters.get(name, name) for name in shapes}
    tensors = {name: tensor for name, tensor in store.tensors.items() if not is_adapter_name(name)}
    for name in hf_shapes(checkpoint.config()):
        if adapter_name(name, "A") in shapes:
            tensors[name] = _merged(store, name, keys, lora.alpha / lora.r, dtype)
    return replace(checkpoint, store=TensorStore(tensors))


def _merged(
    store: TensorStore, name: str, keys: Mapping[str, str], scale: float, dtype: torch.dtype | None
) -> StoredTensor:
    weight = store.tensors[name]
    dtype = dtype or weight.dtype
    a, b = (keys[adapter_name(name, matrix)] for matrix in "AB")
    sums = _MergedElements(store, name, a, b, scale, dtype)
    return StoredTensor(dtype, weight.shape, (Piece((0,) * len(weight.shape), weight.shape, sums),))


@dataclass(frozen=True)
class _MergedElements:
    """The elements of W + scale B A."""

    store: TensorStore
    weight: str
    a: str
    b: str
    scale: float
    dtype: torch.dtype

    def copy(self, index: tuple[slice, ...], out: Raw) -> None:
        rows, columns = index
        a, b = self.store.read(self.a, (slice(None), columns)), self.store.read(self.b, (rows,))
        merged = self.store.read(self.weight, index).float() + low_rank_product(b.float(), a.float(), self.scale)
        np.copyto(out, raw_array(merged.to(self.dtype)))
