"""Weights from a checkpoint of any kind into the layers of a running model, each rank reading what it holds."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from hybrid.config.model import LlamaConfig, read_model_json
from hybrid.convert.adapters import with_merged_adapters
from hybrid.convert.errors import CheckpointError, listed
from hybrid.convert.hub import fetch
from hybrid.convert.misplaced import check_place
from hybrid.convert.names import EMBEDDING, HEAD
from hybrid.convert.resize import with_more_tokens
from hybrid.convert.sources import Checkpoint, open_checkpoint, weight_problems
from hybrid.tensor_parallel.params import Segment, named_segments

_LOGGER = logging.getLogger(__name__)

_NOT_COMPUTED_WITH = {"initializer_range", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"}
"""Fields that change nothing about what the weights compute."""

_SHAPING = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "attention_bias", "mlp_bias"),
)
"""Fields without which weights are not those of the model."""


def check_model(source: str | Path, config: LlamaConfig, *, resize_vocab: bool = False) -> None:
    """Compare a checkpoint's config.json with the model of the run, before anything large is made or read.

    Raises:
        CheckpointError: they are different models; lists every size in which they differ.
    """
    path = fetch(source)
    check_place(path)
    if not (path / "config.json").exists():
        return
    theirs = LlamaConfig.from_hf(read_model_json(str(path / "config.json")))
    different = [
        f"{field} {getattr(theirs, field)} in it, {getattr(config, field)} in the run"
        for field in _SHAPING
        if getattr(theirs, field) != getattr(config, field)
        and not (field == "vocab_size" and resize_vocab and theirs.vocab_size < config.vocab_size)
    ]
    if different:
        raise CheckpointError(
            [
                f"it is another model than the run's: {'; '.join(different)}: give --model {source} or the weights of "
                "the model"
            ],
            str(source),
        )


@torch.no_grad()
def load_weights(
    module: torch.nn.Module, config: LlamaConfig, source: str | Path, *, resize_vocab: bool = False
) -> None:
    """Fill the module's parameters; no collective call, and every rank comes to the same errors.

    Only the headers of the files are read, and of their tensors the slices that the module's parameters hold. Weights
    take the parameters' dtype; vocabulary padding is left as it is. Adapters in the checkpoint are merged.

    Args:
        source: a folder in any format of `open_checkpoint`, or the name of a repository of the Hugging Face hub.
        resize_vocab: take a checkpoint with fewer tokens than the model; the new rows are the mean of the old.

    Raises:
        ConfigError: the checkpoint is not one of this model; lists every name and shape that is wrong.
    """
    checkpoint = with_merged_adapters(open_checkpoint(source), torch.float32)
    if resize_vocab:
        checkpoint = replace(checkpoint, store=with_more_tokens(checkpoint.store, config.vocab_size))
    problems, ignored = weight_problems(checkpoint.store, config)
    if problems:
        raise CheckpointError(problems, f"{source}, for the model of this run")
    if not dist.is_initialized() or dist.get_rank() == 0:
        _tell(checkpoint, config, ignored)
    tied_copy = config.tie_word_embeddings and HEAD in checkpoint.store
    for param, segment in named_segments(module):
        if segment.shard.length:
            values = checkpoint.store.read(segment.hf_name, segment.source)
            if tied_copy and segment.hf_name == EMBEDDING:
                _check_tied(checkpoint, segment, values)
            param[segment.local].copy_(values)


def _check_tied(checkpoint: Checkpoint, segment: Segment, embedding: torch.Tensor) -> None:
    if not torch.equal(checkpoint.store.read(HEAD, segment.source), embedding):
        raise CheckpointError(
            [
                f"the model ties its head to the embedding, but {HEAD} is not {EMBEDDING}: "
                "set tie_word_embeddings to false"
            ],
            str(checkpoint.path),
        )


def _tell(checkpoint: Checkpoint, config: LlamaConfig, ignored: list[str]) -> None:
    """Say what is ignored, and where the run's model is not the one the weights were made with."""
    if ignored:
        _LOGGER.info("%s: ignored %s", checkpoint.path, listed(ignored))
    if not (checkpoint.path / "config.json").exists():
        return
    theirs, ours = checkpoint.config().model_dump(), config.model_dump()
    computed = {"max_position_embeddings"} if config.rope.reads_max_positions else set()
    for field in sorted(ours.keys() - (_NOT_COMPUTED_WITH - computed)):
        if theirs[field] != ours[field]:
            _LOGGER.warning(
                "%s was made with %s %s, this run computes with %s", checkpoint.path, field, theirs[field], ours[field]
            )
