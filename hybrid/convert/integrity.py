"""Whether the bytes of a checkpoint are those that were written: its files against its manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from hybrid.config.errors import ConfigError
from hybrid.convert.checksum import Checksum, checksum, file_checksum
from hybrid.convert.errors import CheckpointError, listed
from hybrid.convert.manifest import FileRecord, Manifest
from hybrid.convert.parallel import Check, run_all
from hybrid.convert.store import CHUNK_BYTES, TensorFile
from hybrid.convert.tensorfile import Entry, read_header


def check_bytes(directory: Path, manifest: Manifest, workers: int) -> None:
    """Read all that the manifest lists.

    Raises:
        CheckpointError: something was changed since it was written; lists all of it.
    """
    if problems := checksum_problems(directory, manifest, workers):
        raise CheckpointError([listed(problems)], str(directory))


def checksum_problems(directory: Path, manifest: Manifest, workers: int = 1) -> list[str]:
    """Files and tensors whose bytes are not those that were written, `workers` of them read at a time."""
    problems: list[str] = []
    jobs: list[Callable[[Check], Iterator[str]]] = []
    for name, record in manifest.files.items():
        path = directory / name
        if not record.tensors:
            jobs.append(partial(_file_problems, path, record))
            continue
        try:
            header, file = read_header(path), TensorFile(path)
        except ConfigError as error:
            problems += error.violations
            continue
        if checksum(header.raw) != record.checksum:
            problems.append(f"the header of {name} was changed: its checksum is not the manifest's; copy it again")
        for tensor, expected in record.tensors.items():
            jobs.append(partial(_tensor_problems, file, header.entries.get(tensor), tensor, expected))
    found: dict[int, list[str]] = {}

    def compare(number: int, check: Check) -> None:
        found[number] = list(jobs[number](check))

    run_all(compare, range(len(jobs)), workers)
    return problems + [problem for number in sorted(found) for problem in found[number]]


def _file_problems(path: Path, record: FileRecord, check: Check) -> Iterator[str]:
    check()
    if file_checksum(path) != record.checksum:
        yield f"{path.name} was changed: its checksum is not the manifest's; copy it again"


def _tensor_problems(file: TensorFile, entry: Entry | None, tensor: str, expected: str, check: Check) -> Iterator[str]:
    digest = Checksum()
    if entry is not None:
        # Read, not mapped: a page fault costs more than the copy of the page, which is still in the core's cache.
        buffer = np.empty(CHUNK_BYTES, np.uint8)
        for start in range(0, entry.nbytes, CHUNK_BYTES):
            check()
            part = buffer[: min(CHUNK_BYTES, entry.nbytes - start)]
            file.read_into(part, entry.position + start)
            digest.update(part)
    if digest.hexdigest() != expected:
        yield f"{tensor} in {file.path.name} was changed: its checksum is not the manifest's; copy the file again"
