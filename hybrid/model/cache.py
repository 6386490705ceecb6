"""Keys and values of the tokens so far, for decoding one token after the other."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """The keys and values of one attention layer on this rank, [length so far, b, kv_heads, d]."""

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._length = 0
        self._keys = self._values = torch.empty(0)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of the next tokens [s, b, kv_heads, d]; all of them so far."""
        if self._length == 0:
            # Once, at full length: growing would copy the whole in every step.
            self._keys = keys.new_empty(self._max_length, *keys.shape[1:])
            self._values = torch.empty_like(self._keys)
        stop = self._length + keys.size(0)
        self._keys[self._length : stop] = keys
        self._values[self._length : stop] = values
        self._length = stop
        return self._keys[:stop], self._values[:stop]
