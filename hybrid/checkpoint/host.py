"""Copies of a rank's state in host memory, from which a checkpoint is written while training goes on."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import replace

import torch

from hybrid.checkpoint.parts import Part

_ALIGNMENT = 64


class HostBuffer:
    """One copy; its memory is kept from one checkpoint to the next, since pinning or touching new pages is slow."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._memory.nbytes

    def copy(self, parts: Sequence[Part]) -> list[Part]:
        """The same parts, their data in this buffer.

        Raises:
            RuntimeError: there is not enough memory.
        """
        starts, end = [], 0
        for part in parts:
            starts.append(end)
            end += -(-part.data.nbytes // _ALIGNMENT) * _ALIGNMENT
        on_gpu = any(part.data.is_cuda for part in parts)
        if end > self._memory.nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old memory goes before the new comes
            self._memory = torch.empty(end, dtype=torch.uint8, pin_memory=on_gpu)
        copies = []
        for part, start in zip(parts, starts, strict=True):
            target = self._memory[start : start + part.data.nbytes].view(part.data.dtype)
            target.copy_(part.data, non_blocking=on_gpu)
            copies.append(replace(part, data=target))
        if on_gpu:
            torch.cuda.current_stream().synchronize()  # the next step changes the source
        return copies


class HostBuffers:
    """Two buffers: the third checkpoint waits until the first is written, so that host memory is bounded."""

    COUNT = 2

    def __init__(self) -> None:
        # The last one given back is the next one used: the second exists only if the first is ever busy.
        self._free: queue.LifoQueue[HostBuffer] = queue.LifoQueue()
        self._all = [HostBuffer() for _ in range(self.COUNT)]
        for buffer in self._all:
            self._free.put(buffer)

    @property
    def nbytes(self) -> int:
        """Host memory held: at most twice what this rank writes."""
        return sum(buffer.nbytes for buffer in self._all)

    def take(self) -> HostBuffer:
        """A free buffer; waits for one."""
        return self._free.get()

    def give_back(self, buffer: HostBuffer) -> None:
        """What was copied to it is written, or given up."""
        self._free.put(buffer)
