"""Named tensors that lie in pieces in files of any layout; answers any slice, and reads no other bytes."""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hybrid.convert.errors import CheckpointError
from hybrid.convert.tensorfile import Entry

Raw = npt.NDArray[Any]
"""Elements as unsigned integers of their width: copying knows no dtype."""

Box = tuple[tuple[int, int], ...]
"""Start and stop in each dim."""

CHUNK_BYTES = 1 << 20
"""What is copied at a time: fits the core's cache, so that the checksum's pass over it is nearly free."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Those numpy knows as well."""

_RAW = {size: np.dtype(f"u{size}") for size in _INTEGERS}


def raw_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The unsigned integers of a dtype's width."""
    return _RAW[dtype.itemsize]


def raw_array(tensor: torch.Tensor) -> Raw:
    """A tensor's own memory as unsigned integers of its width."""
    array: Raw = tensor.detach().view(_INTEGERS[tensor.element_size()]).numpy()
    return array.view(raw_dtype(tensor.dtype))


def whole(shape: Sequence[int]) -> Box:
    """The box of all elements."""
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Its sizes."""
    return tuple(stop - start for start, stop in box)


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Slices, missing ones taken whole, as a box."""
    parts = [part.indices(size) for part, size in zip(index, shape, strict=False)]
    return (*((start, stop) for start, stop, _ in parts), *whole(shape[len(parts) :]))


def _cut(one: Box, other: Box) -> Box | None:
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def _relative(box: Box, origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start - zero, stop - zero) for (start, stop), zero in zip(box, origin, strict=True))


class TensorFile:
    """A file read by position, and mapped for slices that are strided in it; opened when first needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._map: npt.NDArray[np.uint8] | None = None

    @property
    def opened(self) -> bool:
        """Whether anything of it was read."""
        return self._fd is not None

    def _descriptor(self) -> int:
        with self._lock:
            if self._fd is None:
                try:
                    self._fd = os.open(self.path, os.O_RDONLY)
                except OSError as error:
                    raise self._unreadable(error) from None
            return self._fd

    def _unreadable(self, error: OSError) -> CheckpointError:
        return CheckpointError([f"it cannot be read: {error.strerror}"], str(self.path))

    def mapped(self) -> npt.NDArray[np.uint8]:
        """All of its bytes, as pages of the page cache."""
        fd = self._descriptor()
        with self._lock:
            if self._map is None:
                self._map = np.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_READ), np.uint8)
            return self._map

    def read_into(self, out: Raw, position: int) -> None:
        """Fill the contiguous `out` with the bytes from `position` on."""
        view = out.reshape(-1).view(np.uint8).data
        while len(view):
            try:
                count = os.preadv(self._descriptor(), [view], position)
            except OSError as error:
                raise self._unreadable(error) from None
            if count == 0:
                raise CheckpointError([f"it ended at byte {position:,} while it was read"], str(self.path))
            view, position = view[count:], position + count

    def __del__(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


class PieceData(Protocol):
    """The elements of one piece."""

    def copy(self, index: tuple[slice, ...], out: Raw) -> None:
        """Copy `piece[index]` to `out`."""


@dataclass(frozen=True)
class FilePiece:
    """Elements in row-major order at a position of a file."""

    file: TensorFile
    entry: Entry

    def copy(self, index: tuple[slice, ...], out: Raw) -> None:
        shape, dtype = self.entry.shape, raw_dtype(self.entry.dtype)
        if _full(index[1:], shape[1:]) and (out.flags.c_contiguous or out.nbytes <= 2 * CHUNK_BYTES):
            # Read, not mapped: a page fault costs more than the copy of the page.
            rows = out if out.flags.c_contiguous else np.empty(out.shape, dtype)
            start = index[0].start * math.prod(shape[1:]) * dtype.itemsize
            self.file.read_into(rows, self.entry.position + start)
            if rows is not out:
                np.copyto(out, rows)
            return
        data = self.file.mapped()[self.entry.position : self.entry.position + self.entry.nbytes]
        np.copyto(out, np.ndarray(shape, dtype, data)[index])


def _full(index: tuple[slice, ...], shape: tuple[int, ...]) -> bool:
    return all(part.start == 0 and part.stop == size for part, size in zip(index, shape, strict=True))


@dataclass(frozen=True)
class ArrayPiece:
    """Elements that torch has mapped."""

    tensor: torch.Tensor

    def copy(self, index: tuple[slice, ...], out: Raw) -> None:
        np.copyto(out, raw_array(self.tensor)[index])


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    data: PieceData

    @property
    def box(self) -> Box:
        return tuple((zero, zero + size) for zero, size in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, whole, with what it is made of."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def problem(self) -> str | None:
        """Why the pieces are not the tensor, or None: they have to cover each element once."""
        boxes = sorted(piece.box for piece in self.pieces if math.prod(piece.shape))
        # A training checkpoint has a slice of each data-parallel rank: only those that share rows are compared.
        sharing: list[Box] = []
        for box in boxes:
            sharing = [other for other in sharing if other[0][1] > box[0][0]]
            if any(_cut(box, other) for other in sharing):
                return "two of its slices overlap"
            sharing.append(box)
        covered = sum(math.prod(box_shape(box)) for box in boxes)
        if covered != math.prod(self.shape):
            return f"its slices hold {covered:,} of {math.prod(self.shape):,} elements"
        return None


class TensorStore:
    """The tensors of a checkpoint by name."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self.tensors = dict(tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def _fill(self, tensor: StoredTensor, box: Box, out: Raw) -> None:
        """Copy the elements of `box` to `out`, of the same shape."""
        for piece in tensor.pieces:
            if common := _cut(piece.box, box):
                piece.data.copy(_relative(common, piece.offset), out[_relative(common, [start for start, _ in box])])

    def chunks(self, name: str, box: Box, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Raw]:
        """The elements of `box` in row-major order, some rows at a time; each array is overwritten by the next."""
        tensor, shape = self.tensors[name], box_shape(box)
        if not math.prod(shape):
            return
        row_bytes = math.prod(shape[1:]) * tensor.dtype.itemsize
        rows = min(shape[0], max(1, chunk_bytes // row_bytes))
        buffer = np.empty((rows, *shape[1:]), raw_dtype(tensor.dtype))
        first, last = box[0]
        for start in range(first, last, rows):
            stop = min(start + rows, last)
            out = buffer[: stop - start]
            self._fill(tensor, ((start, stop), *box[1:]), out)
            yield out

    def read(self, name: str, index: Sequence[slice] = ()) -> torch.Tensor:
        """`tensor[index]` in memory of its own, in the dtype it is stored in."""
        tensor = self.tensors[name]
        box = box_of(index, tensor.shape)
        result = torch.empty(box_shape(box), dtype=tensor.dtype)
        self._fill(tensor, box, raw_array(result))
        return result
