"""Checkpoints as they lie on disk, of any kind, as one store of Hugging Face names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybrid.config.model import LlamaConfig, read_model_json
from hybrid.convert.errors import CheckpointError, listed
from hybrid.convert.hub import fetch
from hybrid.convert.layers import layer_file, layer_tensors
from hybrid.convert.manifest import SHARDED, Manifest, file_problems, is_manifest, read_manifest
from hybrid.convert.misplaced import check_place
from hybrid.convert.names import hf_shapes, is_state_key
from hybrid.convert.store import ArrayPiece, FilePiece, Piece, StoredTensor, TensorFile, TensorStore
from hybrid.convert.tensorfile import OFFSETS_KEY, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OLD_SINGLE, OLD_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"

HUGGING_FACE, PICKLED = "Hugging Face safetensors", "Hugging Face pytorch_model.bin"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_HARMLESS = re.compile(r"(model\.layers\.\d+\.self_attn\.|model\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
"""Tables that old versions of transformers saved; they follow from the configuration."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was found; only its headers have been read."""

    path: Path
    kind: str
    """Its format, for people."""
    store: TensorStore
    manifest: Manifest | None
    """Of the formats of this package."""

    def raw_config(self) -> dict[str, Any]:
        """Its config.json.

        Raises:
            ConfigError: there is none, or it is not a JSON object.
        """
        return read_model_json(str(self.path / "config.json"))

    def config(self) -> LlamaConfig:
        """The model it says it is.

        Raises:
            ConfigError: not one this package runs.
        """
        return LlamaConfig.from_hf(self.raw_config())


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Find out what `source` is, and read the headers of its files.

    Args:
        source: a folder, or the name of a repository of the Hugging Face hub.

    Raises:
        CheckpointError: there is nothing, nothing this package reads, or files that are missing or damaged.
    """
    path = fetch(source)
    check_place(path)
    if is_manifest(path):
        return _open_own(path)
    readers: list[tuple[str, str, str, Callable[[Iterable[Path]], dict[str, StoredTensor]]]] = [
        (HUGGING_FACE, SINGLE, INDEX, _read_safetensors),
        (PICKLED, OLD_SINGLE, OLD_INDEX, _read_pickled),
    ]
    for kind, single, index, read in readers:
        if (path / single).exists():
            return Checkpoint(path=path, kind=kind, store=TensorStore(read([path / single])), manifest=None)
        if (path / index).exists():
            return Checkpoint(path=path, kind=kind, store=_read_indexed(path / index, read), manifest=None)
    raise CheckpointError([_why_not(path)], str(path))


def _why_not(path: Path) -> str:
    wanted = f"neither {SINGLE} nor {INDEX}, {OLD_SINGLE}, {OLD_INDEX} or manifest.json"
    if any(path.glob("consolidated.*.pth")):
        return (
            "it holds weights in Meta's own format, whose q and k rows are in another order: convert them with "
            "transformers' convert_llama_weights_to_hf.py first"
        )
    if any(path.glob("layer_*-model_*-model_states.pt")) or any(path.glob("*.safetensors")):
        return f"it holds {wanted}: a sharded checkpoint without manifest is not complete, or of a foreign layout"
    return f"it holds {wanted}: is it a checkpoint?"


def _open_own(path: Path) -> Checkpoint:
    manifest = read_manifest(path)
    if problems := file_problems(path, manifest):
        raise CheckpointError(problems, str(path))
    if manifest.format == SHARDED:
        files = [path / name for name, record in manifest.files.items() if record.tensors]
        store = TensorStore(_read_safetensors(files))
    else:
        store = TensorStore(_read_layers(path, manifest))
    return Checkpoint(path=path, kind=manifest.format, store=store, manifest=manifest)


def _read_indexed(index: Path, read: Callable[[Iterable[Path]], dict[str, StoredTensor]]) -> TensorStore:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError([f"it is not an index with a weight_map: {error}"], str(index)) from None
    if missing := [name for name in files if not (index.parent / name).exists()]:
        raise CheckpointError(
            [f"it names {name}, which is not there: download it again" for name in missing], str(index)
        )
    tensors: dict[str, StoredTensor] = {}
    problems = []
    for name in files:
        held = read([index.parent / name])
        problems += [f"{key} lies in {name} and in another file" for key in held.keys() & tensors.keys()]
        problems += [f"{key} is not in {name}, as the index says" for key in _placed(weight_map, name) - held.keys()]
        tensors.update(held)
    if problems:
        raise CheckpointError(sorted(problems), str(index))
    return TensorStore(tensors)


def _placed(weight_map: Mapping[str, str], file: str) -> set[str]:
    return {key for key, name in weight_map.items() if name == file}


def _read_safetensors(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """The tensors of safetensors files, whose slices may lie in several of them."""
    pieces: dict[str, list[tuple[torch.dtype, Piece]]] = {}
    for path in paths:
        header, file = read_header(path), TensorFile(path)
        try:
            offsets = header.offsets()
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError([f"its {OFFSETS_KEY} cannot be read: {error!r}"], str(path)) from None
        for name, entry in header.entries.items():
            piece = Piece(offsets[name], entry.shape, FilePiece(file, entry))
            pieces.setdefault(name, []).append((entry.dtype, piece))
    return {name: _join(name, parts) for name, parts in pieces.items()}


def _join(name: str, parts: list[tuple[torch.dtype, Piece]]) -> StoredTensor:
    dtypes = {dtype for dtype, _ in parts}
    if len(dtypes) > 1:
        raise CheckpointError([f"the slices of {name} have the dtypes {', '.join(sorted(map(str, dtypes)))}"])
    shape = tuple(max(stops) for stops in zip(*(_ends(piece) for _, piece in parts), strict=True))
    return StoredTensor(dtypes.pop(), shape, tuple(piece for _, piece in parts))


def _ends(piece: Piece) -> list[int]:
    return [stop for _, stop in piece.box]


def _load_pickled(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a file of torch.save, mapped where it is of the kind that can be; nothing in it is executed."""
    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load fails with whatever the bytes lead it to
        reason = str(error).partition("\n")[0]
        raise CheckpointError([f"torch.load cannot read it: {reason}"], str(path)) from None
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise CheckpointError(["it is not a dict of tensors"], str(path))
    return content


def _read_pickled(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    return {name: _stored(tensor) for path in paths for name, tensor in _load_pickled(path).items()}


def _stored(tensor: torch.Tensor) -> StoredTensor:
    shape = tuple(tensor.shape)
    return StoredTensor(tensor.dtype, shape, (Piece((0,) * len(shape), shape, ArrayPiece(tensor)),))


def _read_layers(path: Path, manifest: Manifest) -> dict[str, StoredTensor]:
    """The Hugging Face slices of DeepSpeed's layer files."""
    config = LlamaConfig.from_hf(read_model_json(str(path / "config.json")))
    tp_size = manifest.layout.tensor_model_parallel_size
    pieces: dict[str, list[tuple[torch.dtype, Piece]]] = {}
    for tp_rank in range(tp_size):
        for index, layer in layer_tensors(config, tp_size, tp_rank):
            file = path / layer_file(index, tp_rank)
            held = _load_pickled(file)
            wrong = [p.name for p in layer if p.name not in held or tuple(held[p.name].shape) != p.shape]
            if wrong or len(held) != len(layer):
                raise CheckpointError(
                    [f"it should hold exactly {', '.join(f'{p.name} {p.shape}' for p in layer)}"], str(file)
                )
            for param in layer:
                for segment in param.segments:
                    if segment.shard.owner and segment.shard.length:
                        offset = tuple(part.start or 0 for part in segment.source)
                        offset += (0,) * (len(segment.hf_shape) - len(offset))
                        part = held[param.name][segment.local]
                        piece = Piece(offset, segment.local_shape, ArrayPiece(part))
                        pieces.setdefault(segment.hf_name, []).append((part.dtype, piece))
    return {name: _join(name, parts) for name, parts in pieces.items()}


def weight_problems(
    store: TensorStore, config: LlamaConfig, adapters: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[list[str], list[str]]:
    """(what is wrong, names that are ignored) with a store's weights for a model: strict in names and shapes.

    Args:
        adapters: shapes of the matrices there have to be besides.
    """
    wanted, found = (
        {**hf_shapes(config), **(adapters or {})},
        {n: t for n, t in store.tensors.items() if not is_state_key(n)},
    )
    ignored = sorted(name for name in found.keys() - wanted.keys() if _HARMLESS.fullmatch(name))
    if config.tie_word_embeddings and "lm_head.weight" in found:
        ignored.append("lm_head.weight")  # a copy of the embedding; `tied_head_problem` holds it to that
    missing, unexpected = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys() - {*ignored})
    problems = []
    if missing:
        problems.append(f"missing: {listed(missing)}")
    if unexpected:
        problems.append(f"unexpected: {listed(unexpected)}")
    if missing == ["lm_head.weight"]:
        problems.append("if its head is the embedding, set tie_word_embeddings to true in its config.json")
    for name in (name for name in wanted if name in found):
        tensor = found[name]
        if tensor.shape != wanted[name]:
            problems.append(f"{name} has shape {list(tensor.shape)}, the model needs {list(wanted[name])}")
        elif fault := tensor.problem():
            problems.append(f"{name}: {fault}")
        elif tensor.dtype not in _DTYPES:
            problems.append(f"{name} is {tensor.dtype}: only float32, bfloat16 and float16 weights are supported")
    return problems, ignored
