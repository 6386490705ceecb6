"""The model, the data and the step that everything in a comparison trains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from hybrid.config.model import LlamaConfig

Share = Literal["data", "tensor", "pipe", "whole"]
"""How the work of a step is cut in two."""

Batch = tuple[torch.Tensor, torch.Tensor]
"""Token ids and shifted labels, each [b, s]."""

OPTIMIZER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SEED = 0
"""Of the initial weights, for all."""
CLIPPING = 1.0
"""Largest norm of the gradient, for all."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One optimizer step of a model: `sequences` microbatches of one sequence each."""

    model: dict[str, Any]
    """As in a Hugging Face config.json."""
    sequences: int
    seq_length: int
    bucket_size: int
    """Elements a gradient bucket aims at, for all that have buckets."""
    layers_per_stage: tuple[int, ...]
    """Decoder layers of each pipeline stage; the head takes about as long as one."""
    interleaved: tuple[int, ...]
    """The same with two stages a rank."""

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig.from_hf(self.model)

    def share(self, kind: Share) -> Workload:
        """Half of the work as one process would do it alone, with half of the FLOPs of every GEMM or half as many."""
        model = self.model
        if kind == "data":
            return replace(self, sequences=self.sequences // 2)
        if kind == "tensor":
            cut = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
            sizes = {key: model[key] // 2 for key in cut}
            return replace(self, model={**model, **sizes})
        if kind == "pipe":
            return replace(
                self, model={**model, **{key: model[key] // 2 for key in ("num_hidden_layers", "vocab_size")}}
            )
        return self

    def batches(self, count: int, seed: int) -> list[Batch]:
        """`count` microbatches of random tokens."""
        generator = torch.Generator().manual_seed(seed)
        vocab = self.model["vocab_size"]
        rows = torch.randint(0, vocab, (count, 1, self.seq_length + 1), generator=generator)
        return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]


_COMMON = {"model_type": "llama", "rms_norm_eps": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": False}

FULL = Workload(
    model={
        **_COMMON,
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 512,
    },
    sequences=4,
    seq_length=512,
    bucket_size=4_000_000,
    layers_per_stage=(4, 4),
    interleaved=(2, 2, 3, 1),
)
"""32.0M parameters."""

SMALL = Workload(
    model={
        **_COMMON,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
    },
    sequences=4,
    seq_length=64,
    bucket_size=50_000,
    layers_per_stage=(2, 2),
    interleaved=(1, 1, 1, 1),
)
"""To try the runner, not to measure."""
