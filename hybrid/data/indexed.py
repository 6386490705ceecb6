"""Megatron's indexed token files: a `.bin` of token ids and an `.idx` that says where each document lies.

Layout of the `.idx`, little-endian, as Megatron-LM's `IndexedDataset` writes it: magic, version (uint64), dtype code
(uint8), number of sequences (uint64), length of the document index (uint64), sequence lengths (int32), sequence
pointers in bytes (int64), document index (int64, the first sequence of each document and one past the last).
"""

from __future__ import annotations

import os
import shutil
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from hybrid.data.cache import temporary_beside

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, type[np.number]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
"""Megatron's codes. DeepSpeed's writer uses the same magic with other meanings from 6 on."""
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}
_LONGEST_SEQUENCE = 2**31 - 1
_CHUNK = 1 << 20


def bin_path(prefix: str | Path) -> Path:
    """The token file of a prefix."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """The index file of a prefix."""
    return Path(f"{prefix}.idx")


def exists(prefix: str | Path) -> bool:
    """Whether both files of a prefix are there."""
    return bin_path(prefix).is_file() and idx_path(prefix).is_file()


def dtype_for_vocab(vocab_size: int) -> np.dtype[np.integer]:
    """The dtype of token ids: uint16 where the vocabulary is smaller than 65,536, else int32."""
    return np.dtype(np.uint16) if vocab_size < 65_536 else np.dtype(np.int32)


class IndexedWriter:
    """Writes a token file sequence by sequence.

    Both files grow under a temporary name beside the final one. `finish` renames them, the `.idx` last, so a prefix
    whose `.idx` exists is complete. Leaving the `with` block without `finish` removes the temporary files.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[np.integer]) -> None:
        self._prefix = Path(prefix)
        self._dtype = dtype.newbyteorder("<")
        self._limits = np.iinfo(dtype)
        self._prefix.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = temporary_beside(self._prefix)
        self._bin: BinaryIO = bin_path(self._temporary).open("wb")
        self._lengths = array("i")
        self._documents = array("q", [0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._bin.close()
        bin_path(self._temporary).unlink(missing_ok=True)
        idx_path(self._temporary).unlink(missing_ok=True)

    @property
    def documents(self) -> int:
        """Documents ended so far."""
        return len(self._documents) - 1

    def add(self, tokens: NDArray[np.integer] | Sequence[int]) -> None:
        """Append one sequence to the open document.

        Raises:
            ValueError: an id does not fit in the dtype, or the sequence is longer than the format can say.
        """
        if len(tokens) > _LONGEST_SEQUENCE:
            raise ValueError(f"a sequence of {len(tokens)} tokens exceeds the format's {_LONGEST_SEQUENCE}; cut it")
        try:
            # numpy refuses a Python int out of range, but wraps an array's elements silently.
            values = np.asarray(tokens, dtype=np.int64) if not isinstance(tokens, np.ndarray) else tokens
            if values.size and (values.min() < self._limits.min or values.max() > self._limits.max):
                raise OverflowError
        except OverflowError:
            raise ValueError(
                f"document {self.documents} holds token ids outside {self._dtype.name}; write it with a larger dtype"
            ) from None
        values.astype(self._dtype).tofile(self._bin)
        self._lengths.append(len(values))

    def end_document(self) -> None:
        """Close the open document; the next sequence starts another."""
        self._documents.append(len(self._lengths))

    def finish(self) -> None:
        """Write the index and give both files their final names."""
        self._bin.close()
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.zeros(0, np.int32)
        with idx_path(self._temporary).open("wb") as file:
            _write_header(file, self._dtype, len(lengths), len(self._documents))
            lengths.astype("<i4").tofile(file)
            _pointers(lengths, self._dtype.itemsize).astype("<i8").tofile(file)
            np.frombuffer(self._documents, dtype=np.int64).astype("<i8").tofile(file)
        _publish(self._temporary, self._prefix)


def _write_header(file: BinaryIO, dtype: np.dtype[np.integer], sequences: int, document_entries: int) -> None:
    code = _CODES[np.dtype(dtype).newbyteorder("=")]
    file.write(_HEADER.pack(_MAGIC, _VERSION, code, sequences, document_entries))


def _pointers(lengths: NDArray[np.int32], itemsize: int, start: int = 0) -> NDArray[np.int64]:
    """Byte offset of each sequence, the first at `start`."""
    ends = np.cumsum(lengths, dtype=np.int64) * itemsize + start
    return np.concatenate([np.array([start], np.int64), ends[:-1]])[: len(lengths)]


def _publish(temporary: Path, prefix: Path) -> None:
    os.replace(bin_path(temporary), bin_path(prefix))
    os.replace(idx_path(temporary), idx_path(prefix))


class IndexedDataset:
    """A token file, memory-mapped: documents are read by number, nothing is loaded up front.

    A document is the concatenation of its sequences, as in Megatron's document index.

    Raises:
        ValueError: the files are missing, truncated, or not of this format.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        for path in (bin_path(prefix), idx_path(prefix)):
            if not path.is_file():
                raise ValueError(f"{path} does not exist; a token file is a pair of PREFIX.bin and PREFIX.idx")
        index = np.memmap(idx_path(prefix), mode="r", dtype=np.uint8)
        self.dtype, sequences, entries = self._read_header(bytes(index[: _HEADER.size]))
        sections = (("<i4", sequences), ("<i8", sequences), ("<i8", entries))
        if index.size < _HEADER.size + sum(np.dtype(dtype).itemsize * count for dtype, count in sections):
            raise ValueError(f"{idx_path(prefix)} is truncated: {index.size} bytes cannot hold {sequences} sequences")
        views, start = [], _HEADER.size
        for dtype, count in sections:
            stop = start + np.dtype(dtype).itemsize * count
            views.append(index[start:stop].view(dtype))
            start = stop
        self.sequence_lengths: NDArray[np.int32] = views[0]
        self.sequence_pointers: NDArray[np.int64] = views[1]
        self.document_indices: NDArray[np.int64] = views[2]
        size = bin_path(prefix).stat().st_size
        self._check(size)
        # An empty file cannot be mapped.
        self._tokens = np.memmap(bin_path(prefix), mode="r", dtype=self.dtype) if size else np.zeros(0, self.dtype)
        self.lengths = self._document_lengths()
        """Tokens of each document."""

    def _read_header(self, raw: bytes) -> tuple[np.dtype[np.integer], int, int]:
        path = idx_path(self.prefix)
        if len(raw) < _HEADER.size:
            raise ValueError(f"{path} is truncated: {len(raw)} bytes are fewer than its header's {_HEADER.size}")
        magic, version, code, sequences, entries = _HEADER.unpack(raw)
        if magic != _MAGIC or version != _VERSION:
            raise ValueError(f"{path} is no Megatron index of version {_VERSION}: magic {magic!r}, version {version}")
        dtype = np.dtype(_DTYPES.get(code, np.float64))
        if not np.issubdtype(dtype, np.integer):
            raise ValueError(
                f"{path} has dtype code {code}, which is no integer in Megatron's table {sorted(_DTYPES)}; "
                "DeepSpeed's writer uses other codes from 6 on: prepare the text again"
            )
        return dtype.newbyteorder("<"), sequences, entries

    def _check(self, bin_size: int) -> None:
        names = bin_path(self.prefix), idx_path(self.prefix)
        lengths, pointers, documents = self.sequence_lengths, self.sequence_pointers, self.document_indices
        end = int(pointers[-1]) + int(lengths[-1]) * self.dtype.itemsize if len(lengths) else 0
        if end != bin_size:
            raise ValueError(
                f"{names[0]} has {bin_size} bytes, but its index covers {end}: one of the two is cut or stale"
            )
        if len(documents) == 0 or documents[0] != 0 or documents[-1] != len(lengths):
            raise ValueError(f"{names[1]} has a document index that does not cover its {len(lengths)} sequences")

    def _document_lengths(self) -> NDArray[np.integer]:
        if self._one_sequence_each():
            return self.sequence_lengths
        ends = np.concatenate([[0], np.cumsum(self.sequence_lengths, dtype=np.int64)])
        return np.diff(ends[self.document_indices])

    def _one_sequence_each(self) -> bool:
        if len(self) != len(self.sequence_lengths):
            return False
        entries = self.document_indices
        cuts = range(0, len(entries), _CHUNK)
        return all(np.array_equal(entries[a : a + _CHUNK], np.arange(a, min(a + _CHUNK, len(entries)))) for a in cuts)

    def check_contiguous(self) -> None:
        """Read the whole index and refuse one whose sequences do not follow one another.

        Raises:
            ValueError: they do not, so documents could not be read as one piece.
        """
        start = 0
        for a in range(0, len(self.sequence_lengths), _CHUNK):
            lengths, pointers = self.sequence_lengths[a : a + _CHUNK], self.sequence_pointers[a : a + _CHUNK]
            if not np.array_equal(pointers, _pointers(lengths, self.dtype.itemsize, start)):
                path = idx_path(self.prefix)
                raise ValueError(f"{path} has sequences that do not follow one another; write the files again")
            start += int(lengths.sum(dtype=np.int64)) * self.dtype.itemsize

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    def read(self, document: int, offset: int = 0, length: int | None = None) -> NDArray[np.integer]:
        """`length` tokens of a document from `offset` on; all the rest of it if `length` is None. A view, no copy."""
        rest = int(self.lengths[document]) - offset
        count = rest if length is None else length
        assert 0 <= offset and 0 <= count <= rest, "a read stays within its document"
        sequence = int(self.document_indices[document])
        if count == 0 or sequence == len(self.sequence_pointers):
            return self._tokens[:0]
        start = int(self.sequence_pointers[sequence]) // self.dtype.itemsize + offset
        return self._tokens[start : start + count]

    def chunks(self) -> Iterator[NDArray[np.integer]]:
        """All tokens in order, in chunks that are read rather than mapped: mapped pages would count as our memory."""
        with bin_path(self.prefix).open("rb") as file:
            while len(chunk := np.fromfile(file, self.dtype, _CHUNK)):
                yield chunk


def merge(parts: Sequence[str | Path], prefix: str | Path) -> None:
    """Concatenate token files of one dtype, in order.

    Memory does not depend on their size, and one part is open at a time: there may be more than a process may map.
    """
    target = Path(prefix)
    temporary = temporary_beside(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    sequences, documents = 0, 0
    dtypes = set()
    with bin_path(temporary).open("wb") as out:
        for part in map(IndexedDataset, parts):
            sequences += len(part.sequence_lengths)
            documents += len(part)
            dtypes.add(part.dtype)
            with bin_path(part.prefix).open("rb") as source:
                shutil.copyfileobj(source, out, 4 << 20)
    assert len(dtypes) == 1, "the parts of one corpus have one dtype"
    (dtype,) = dtypes
    with idx_path(temporary).open("wb") as out:
        _write_header(out, dtype, sequences, documents + 1)
        for part in map(IndexedDataset, parts):
            part.sequence_lengths.tofile(out)
        start = 0
        for part in map(IndexedDataset, parts):
            _pointers(part.sequence_lengths, dtype.itemsize, start).astype("<i8").tofile(out)
            start += part.num_tokens * dtype.itemsize
        np.zeros(1, "<i8").tofile(out)
        first = 0
        for part in map(IndexedDataset, parts):
            (part.document_indices[1:] + first).astype("<i8").tofile(out)
            first += len(part.sequence_lengths)
    _publish(temporary, target)
