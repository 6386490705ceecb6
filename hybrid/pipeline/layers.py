"""The model's layers as DeepSpeed's pipeline calls them: one tensor in, one tensor out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hybrid.config.model import LlamaConfig
from hybrid.model.block import TransformerBlock
from hybrid.model.rope import Rope
from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.embedding import VocabParallelEmbedding, vocab_parallel_weight

MakeRope = Callable[[int, torch.device], Rope]
"""RoPE tables for a sequence length on a device."""


class BlockPipe(TransformerBlock):
    """A decoder block that gets the RoPE tables from its own stage: only hidden states cross stages."""

    def __init__(
        self, config: LlamaConfig, layer: int, make_rope: MakeRope, *, tp: TensorParallel, **kwargs: Any
    ) -> None:
        super().__init__(config, layer, tp=tp, **kwargs)
        self.sequence_shards = tp.size if tp.sequence_sharded else 1
        self.make_rope = make_rope

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """[s, b, h] (or [s/t, b, h]) to the same shape."""
        rope = self.make_rope(hidden.size(0) * self.sequence_shards, hidden.device)
        return super().forward(hidden, rope)


HeadOutput = tuple[torch.Tensor, nn.Parameter]
"""Normed hidden states [s, b, h] (or [s/t, b, h]) and the head's weight [V/t, h]: the loss never makes all logits."""


class HeadPipe(nn.Module):
    """The output head of an untied model: its weight is laid out like an embedding's, and applied by the loss."""

    def __init__(self, vocab_size: int, hidden_size: int, **kwargs: Any) -> None:
        super().__init__()
        self.weight = vocab_parallel_weight(vocab_size, hidden_size, **kwargs)

    def forward(self, hidden: torch.Tensor) -> HeadOutput:
        """Hand the hidden states and the weight to the loss."""
        return hidden, self.weight


def tied_head(embedding: VocabParallelEmbedding, hidden: torch.Tensor) -> HeadOutput:
    """The output head of a tied model."""
    return hidden, embedding.weight
