"""The output head as the last layer of the pipeline: it is applied by the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hybrid.tensor_parallel.embedding import VocabParallelEmbedding, vocab_parallel_weight

HeadOutput = tuple[torch.Tensor, torch.Tensor]
"""Normed hidden states [s, b, h] (or [s/t, b, h]) and the head's weight [V/t, h]: the loss never makes all logits."""


class HeadPipe(nn.Module):
    """The output head of an untied model: its weight is laid out like an embedding's."""

    def __init__(self, vocab_size: int, hidden_size: int, **kwargs: Any) -> None:
        super().__init__()
        self.weight = vocab_parallel_weight(vocab_size, hidden_size, **kwargs)

    def forward(self, hidden: torch.Tensor) -> HeadOutput:
        """Hand the hidden states and the weight to the loss."""
        return hidden, self.weight


def tied_head(embedding: VocabParallelEmbedding, hidden: torch.Tensor) -> HeadOutput:
    """The output head of a tied model.

    A view has no gradient sink: on one stage the weight gets a gradient from the embedding as well, and autograd adds
    the two before it hands them over.
    """
    return hidden, embedding.weight.view_as(embedding.weight)
