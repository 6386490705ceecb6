"""A checkpoint with rows for more tokens than it was made with."""

from __future__ import annotations

import torch

from hybrid.convert.names import EMBEDDING, HEAD
from hybrid.convert.store import ArrayPiece, Piece, StoredTensor, TensorStore

_ROWS = 4096


def with_more_tokens(store: TensorStore, vocab_size: int) -> TensorStore:
    """`store` with embedding and head of `vocab_size` rows, the new ones the mean of those that are there.

    The mean is what a new token's logit is least surprising with: random rows would get large ones (Hewitt 2021,
    "Initializing new word embeddings for pretrained language models").
    """
    tensors = dict(store.tensors)
    for name in (EMBEDDING, HEAD):
        tensor = tensors.get(name)
        if tensor is not None and len(tensor.shape) == 2 and tensor.shape[0] < vocab_size:
            rows, width = tensor.shape
            new = _mean_row(store, name).to(tensor.dtype).repeat(vocab_size - rows, 1)
            piece = Piece((rows, 0), (vocab_size - rows, width), ArrayPiece(new))
            tensors[name] = StoredTensor(tensor.dtype, (vocab_size, width), (*tensor.pieces, piece))
    return TensorStore(tensors)


def _mean_row(store: TensorStore, name: str) -> torch.Tensor:
    rows, width = store.tensors[name].shape
    total = torch.zeros(width, dtype=torch.float64)
    for start in range(0, rows, _ROWS):
        total += store.read(name, (slice(start, min(start + _ROWS, rows)),)).double().sum(dim=0)
    return total / rows
