"""The checksum of stored bytes: several times faster than a copy of them, so it is always taken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

ALGORITHM = "multilinear64"
"""Over little-endian 64-bit words x, zero-padded to whole blocks of BLOCK bytes, all modulo 2^64: a block is
sum(w_i x_i), the blocks are joined by state = state * JOIN + block, and the length in bytes is added last
(multilinear hashing, Lemire and Kaser 2014). The w_i are splitmix64(i) made odd, so that every single change is seen.
"""

BLOCK = 1 << 18
JOIN = 0x9E3779B97F4A7C15

_MASK = (1 << 64) - 1


def _weights() -> npt.NDArray[np.uint64]:
    z = np.arange(1, BLOCK // 8 + 1, dtype=np.uint64) * np.uint64(JOIN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


_WEIGHTS = _weights()


class Checksum:
    """Takes bytes in order, in parts of any length."""

    def __init__(self) -> None:
        self._state, self._length = 0, 0
        self._rest: Bytes | None = None

    def update(self, data: Bytes) -> None:
        """Add bytes."""
        filled, self._length = self._length % BLOCK, self._length + data.size
        if filled:
            assert self._rest is not None, "it was made when the block was begun"
            head = data[: BLOCK - filled]
            self._rest[filled : filled + head.size] = head
            if filled + head.size < BLOCK:
                return
            self._add(self._rest)
            data = data[head.size :]
        whole = data.size // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            self._add(data[start : start + BLOCK])
        if whole < data.size:
            if self._rest is None:
                self._rest = np.empty(BLOCK, np.uint8)
            self._rest[: data.size - whole] = data[whole:]

    def _add(self, block: Bytes) -> None:
        total = int(np.dot(block.view("<u8"), _WEIGHTS[: block.size // 8]))
        self._state = (self._state * JOIN + total) & _MASK

    def hexdigest(self) -> str:
        """Of all bytes so far."""
        state, filled = self._state, self._length % BLOCK
        if filled:
            assert self._rest is not None, "it holds the begun block"
            block = np.zeros(-(-filled // 8) * 8, np.uint8)
            block[:filled] = self._rest[:filled]
            total = int(np.dot(block.view("<u8"), _WEIGHTS[: block.size // 8]))
            state = (state * JOIN + total) & _MASK
        return f"{(state + self._length) & _MASK:016x}"


def checksum(data: bytes | Bytes) -> str:
    """Of bytes at hand."""
    result = Checksum()
    result.update(np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data)
    return result.hexdigest()


def file_checksum(path: Path) -> str:
    """Of a whole file."""
    result = Checksum()
    with path.open("rb") as file:
        while content := file.read(4 * BLOCK):
            result.update(np.frombuffer(content, np.uint8))
    return result.hexdigest()
