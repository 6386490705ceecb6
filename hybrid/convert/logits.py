"""Logits of a checkpoint, by this package's layers and by transformers, neither holding a model larger than memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from hybrid.config.model import LlamaConfig
from hybrid.convert.names import EMBEDDING, HEAD
from hybrid.convert.sources import Checkpoint
from hybrid.model.block import TransformerBlock
from hybrid.model.norm import RMSNorm
from hybrid.model.rope import rope_tables
from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.params import named_segments

TOLERANCE = 1e-5
"""On fp32 logits of order 1: two correct programs differ by the order of their sums only."""

_MEMORY_SHARE = 0.6
"""Of the free memory, for transformers' model; what does not fit is read from the disk again and again."""


def sample_tokens(config: LlamaConfig, length: int) -> torch.Tensor:
    """Token ids [1, length], always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, config.vocab_size, (1, length), generator=generator)


@torch.no_grad()
def our_logits(checkpoint: Checkpoint, ids: torch.Tensor) -> torch.Tensor:
    """fp32 logits [b, s, vocabulary] of this package's layers, of which one is in memory at a time."""
    config, store = checkpoint.config(), checkpoint.store
    common: dict[str, Any] = {"tp": TensorParallel(group=None, rank=0, size=1), "dtype": torch.float32, "device": "cpu"}
    rows = [store.read(EMBEDDING, (slice(int(token), int(token) + 1),)) for token in ids.flatten()]
    hidden = torch.cat(rows).float().view(*ids.shape, -1).transpose(0, 1).contiguous()
    rope = rope_tables(config, ids.size(1), torch.device("cpu"))
    for layer in range(config.num_hidden_layers):
        block = TransformerBlock(config, layer, **common)
        _fill(block, checkpoint)
        hidden = block.eval()(hidden, rope)
    norm = RMSNorm(config.hidden_size, config.rms_norm_eps, name="model.norm", **common)
    _fill(norm, checkpoint)
    head = store.read(EMBEDDING if config.tie_word_embeddings else HEAD).float()
    return F.linear(norm(hidden), head).transpose(0, 1)


def _fill(module: torch.nn.Module, checkpoint: Checkpoint) -> None:
    for param, segment in named_segments(module):
        param[segment.local].copy_(checkpoint.store.read(segment.hf_name, segment.source))


@torch.no_grad()
def reference_logits(directory: Path, ids: torch.Tensor, memory_bytes: int | None = None) -> torch.Tensor:
    """The same by transformers; accelerate leaves on the disk what does not fit into `memory_bytes`."""
    from transformers import AutoModelForCausalLM

    if memory_bytes is None:
        memory_bytes = int(_MEMORY_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with tempfile.TemporaryDirectory() as offload:
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            device_map="auto",
            max_memory={"cpu": memory_bytes},
            offload_folder=offload,
            attn_implementation="sdpa",
        )
        logits: torch.Tensor = model.eval()(input_ids=ids).logits
    return logits.float()


def logits_difference(reference: Path, checkpoint: Checkpoint, length: int = 16) -> float:
    """Largest difference of the two on some tokens."""
    ids = sample_tokens(checkpoint.config(), length)
    return float((our_logits(checkpoint, ids) - reference_logits(reference, ids)).abs().max())
