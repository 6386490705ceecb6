"""The safetensors file format: its header read with every check, and written before the tensors are at hand.

safetensors' own writer wants all tensors of a file in memory at once.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybrid.convert.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_CODES = {dtype: code for code, dtype in DTYPES.items()}

_METADATA = "__metadata__"

_LENGTH_BYTES = 8

_LONGEST_HEADER = 100_000_000
"""safetensors' own limit."""

SHARDING_KEY = "DCP_SHARDING_INFO"
"""Where torch.distributed.checkpoint keeps the place of each slice: {name: {"saved_offsets": [...]}}, as JSON."""

OFFSETS_KEY = "saved_offsets"


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    position: int
    """First byte, counted from the start of the file."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """What the beginning of a file says about the rest."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    raw: bytes
    """As it stands in the file."""

    @property
    def file_size(self) -> int:
        return len(self.raw) + sum(entry.nbytes for entry in self.entries.values())

    def offsets(self) -> dict[str, tuple[int, ...]]:
        """Where each tensor begins in the whole of which it is a slice: at zero if the file says nothing.

        Raises:
            KeyError, ValueError: the file says it for some of its tensors only, or not legibly.
        """
        if SHARDING_KEY not in self.metadata:
            return {name: (0,) * len(entry.shape) for name, entry in self.entries.items()}
        places = json.loads(self.metadata[SHARDING_KEY])
        return {name: tuple(int(n) for n in places[name][OFFSETS_KEY]) for name in self.entries}


def make_header(tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]) -> Header:
    """The header of a file with these tensors in this order, but wider dtypes first: it keeps all of them aligned."""
    content: dict[str, Any] = {_METADATA: dict(metadata)}
    end, places = 0, {}
    for name, dtype, shape in sorted(tensors, key=lambda tensor: -tensor[1].itemsize):
        start, end = end, end + math.prod(shape) * dtype.itemsize
        content[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        places[name] = (dtype, tuple(shape), start)
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    raw = struct.pack("<Q", len(text)) + text
    entries = {name: Entry(dtype, shape, len(raw) + start) for name, (dtype, shape, start) in places.items()}
    return Header(entries, dict(metadata), raw)


def read_header(path: Path) -> Header:
    """The header of a file, checked against its size.

    Raises:
        CheckpointError: it is not a safetensors file, or not a whole one.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            raw = file.read(_LENGTH_BYTES)
            if len(raw) < _LENGTH_BYTES:
                raise CheckpointError(
                    [f"it has {size} bytes: a safetensors file starts with 8; download it again"], str(path)
                )
            (length,) = struct.unpack("<Q", raw)
            if length > min(_LONGEST_HEADER, size - _LENGTH_BYTES):
                raise CheckpointError(
                    [
                        f"its header should have {length:,} bytes, the file has {size:,}: it is truncated, or not "
                        "a safetensors file"
                    ],
                    str(path),
                )
            raw += file.read(length)
    except OSError as error:
        raise CheckpointError([f"it cannot be read: {error.strerror}"], str(path)) from None
    try:
        header = _parse(raw)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError([f"its header is not that of a safetensors file: {error}"], str(path)) from None
    if header.file_size != size:
        fault = "truncated" if size < header.file_size else "too long"
        raise CheckpointError(
            [f"it is {fault}: its header describes {header.file_size:,} bytes, the file has {size:,}"], str(path)
        )
    return header


def _parse(raw: bytes) -> Header:
    content = json.loads(raw[_LENGTH_BYTES:])
    metadata = content.pop(_METADATA, None) or {}
    entries, expected = {}, 0
    for name, entry in sorted(content.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = entry["data_offsets"]
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name} has dtype {entry['dtype']}, known are {', '.join(DTYPES)}")
        shape = tuple(int(n) for n in entry["shape"])
        entries[name] = parsed = Entry(DTYPES[entry["dtype"]], shape, len(raw) + start)
        if start != expected or end - start != parsed.nbytes or min(shape, default=0) < 0:
            raise ValueError(
                f"{name} of shape {shape} and dtype {entry['dtype']} cannot lie at bytes {start} to {end}, "
                f"with the tensor before it ending at {expected}"
            )
        expected = end
    return Header(entries, metadata, raw)
