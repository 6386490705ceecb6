"""The output projection to the vocabulary, whose rows are cut over the tensor-parallel ranks, with its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.cross_entropy import linear_cross_entropy
from hybrid.tensor_parallel.embedding import vocab_parallel_weight
from hybrid.tensor_parallel.linear import column_parallel


def vocab_parallel_logits(hidden: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
    """[s, b, h] (or [s/t, b, h]) to this rank's columns of the padded logits, [s, b, V/t]."""
    return column_parallel(hidden, weight, None, tp)


class LMHead(nn.Module):
    """An output head with its own weight; a tied one calls the same functions with the embedding's."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device | str,
        name: str = "lm_head",
    ) -> None:
        super().__init__()
        self.tp, self.vocab_size = tp, vocab_size
        self.weight = vocab_parallel_weight(vocab_size, hidden_size, name=name, tp=tp, dtype=dtype, device=device)

    def forward(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the losses over the supervised tokens, fp32, and their number; see `linear_cross_entropy`."""
        return linear_cross_entropy(hidden, self.weight, labels, vocab_size=self.vocab_size, tp=self.tp)
