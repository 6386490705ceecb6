"""The output projection to the vocabulary, whose rows are cut over the tensor-parallel ranks."""

from __future__ import annotations

from torch import Tensor

from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.linear import column_parallel


def vocab_parallel_logits(hidden: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
    """[s, b, h] (or [s/t, b, h]) to this rank's columns of the padded logits, [s, b, V/t]."""
    return column_parallel(hidden, weight, None, tp)
