"""Writes safetensors files of which never more than a chunk per worker is in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from hybrid.convert.checksum import Checksum, checksum
from hybrid.convert.errors import CheckpointError
from hybrid.convert.manifest import FileRecord
from hybrid.convert.parallel import Check, run_all
from hybrid.convert.store import Box, Raw, TensorStore, box_shape, raw_array
from hybrid.convert.tensorfile import OFFSETS_KEY, SHARDING_KEY, make_header

Progress = Callable[[int], None]
"""Told the bytes that were written since it was last told."""

_FORMAT = {"format": "pt"}
"""transformers asks for it."""


class TensorFileWriter:
    """One file whose tensors are given in any order, each as its bytes in order; several threads may write."""

    def __init__(
        self,
        path: Path,
        tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]],
        offsets: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """`offsets`: where each tensor begins in the whole it is a slice of, for torch.distributed.checkpoint."""
        metadata = dict(_FORMAT)
        if offsets is not None:
            places = {name: {OFFSETS_KEY: list(offsets[name])} for name, _, _ in tensors}
            metadata[SHARDING_KEY] = json.dumps(places, separators=(",", ":"))
        self._header = make_header(tensors, metadata)
        self._checksums: dict[str, str] = {}
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._put(np.frombuffer(self._header.raw, np.uint8), 0)

    def _put(self, data: npt.NDArray[np.uint8], position: int) -> None:
        view = data.data
        while len(view):
            count = os.pwrite(self._fd, view, position)
            view, position = view[count:], position + count

    def write(self, name: str, chunks: Iterable[Raw]) -> int:
        """Write a tensor; its bytes."""
        entry, digest, done = self._header.entries[name], Checksum(), 0
        for chunk in chunks:
            data = chunk.reshape(-1).view(np.uint8)
            digest.update(data)
            self._put(data, entry.position + done)
            done += data.size
        assert done == entry.nbytes, f"{name} has {entry.nbytes} bytes, {done} were given"
        self._checksums[name] = digest.hexdigest()
        return done

    def finish(self) -> FileRecord:
        """Close the file; what the manifest says of it."""
        missing = self._header.entries.keys() - self._checksums.keys()
        assert not missing, f"never written: {missing}"
        self.close()
        return FileRecord(
            size=self._header.file_size,
            checksum=checksum(self._header.raw),
            tensors=dict(sorted(self._checksums.items())),
        )

    def close(self) -> None:
        """Close the file as it is."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A tensor of a file to be written: `box` of the tensor `source` of a store."""

    key: str
    source: str
    box: Box
    dtype: torch.dtype


def write_files(
    directory: Path,
    files: Mapping[str, Sequence[Slice]],
    store: TensorStore,
    *,
    sharded: bool,
    workers: int,
    progress: Progress,
) -> dict[str, FileRecord]:
    """Write slices of a store's tensors to files; what the manifest says of each.

    The slices of one tensor are written one after the other, so that a large source is read from the disk once.
    """
    writers: dict[str, TensorFileWriter] = {}
    by_tensor: dict[str, list[tuple[str, Slice]]] = {}
    try:
        for name, slices in files.items():
            tensors = [(part.key, part.dtype, box_shape(part.box)) for part in slices]
            offsets = {part.key: [start for start, _ in part.box] for part in slices} if sharded else None
            writers[name] = TensorFileWriter(directory / name, tensors, offsets)
            for part in slices:
                by_tensor.setdefault(part.source, []).append((name, part))

        def convert(parts: list[tuple[str, Slice]], check: Check) -> None:
            for name, part in parts:
                writers[name].write(part.key, _counted(_chunks(store, part), check, progress))

        run_all(convert, by_tensor.values(), workers)
        return {name: writer.finish() for name, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.close()


def _counted(chunks: Iterator[Raw], check: Check, progress: Progress) -> Iterator[Raw]:
    for chunk in chunks:
        check()
        yield chunk
        progress(chunk.nbytes)


def _chunks(store: TensorStore, part: Slice) -> Iterator[Raw]:
    stored = store.tensors[part.source].dtype
    for chunk in store.chunks(part.source, part.box):
        yield chunk if stored == part.dtype else _cast(chunk, stored, part)


def _cast(chunk: Raw, stored: torch.dtype, part: Slice) -> Raw:
    signed = torch.from_numpy(chunk.view(f"i{chunk.itemsize}"))
    values = signed.view(stored)
    result = values.to(part.dtype)
    if bool((result.isinf() & values.isfinite()).any()):
        largest = torch.finfo(part.dtype).max
        raise CheckpointError(
            [f"{part.source} has values beyond {largest:g}, the largest of {part.dtype}: choose bf16 or fp32"]
        )
    return raw_array(result)
