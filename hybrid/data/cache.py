"""Files made at first use and shared by all processes: no locks, an atomic rename decides."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_WORTH_A_FILE = 1 << 20
"""Bytes from which an array is kept on disk; a smaller one is made again as fast as it is read."""


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/hybrid`, or `~/.cache/hybrid`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybrid"


def fingerprint(*parts: Any) -> str:
    """A short hash of values that JSON can write."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def temporary_beside(path: Path) -> Path:
    """A name in the same folder that no other process uses."""
    return path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}")


def worth_a_file(num_bytes: int) -> bool:
    """Whether `cached_array` keeps an array of this size on disk."""
    return num_bytes >= _WORTH_A_FILE


def cached_array(folder: Path | None, key: str, build: Callable[[], NDArray[Any]]) -> NDArray[Any]:
    """The array `build` makes: memory-mapped from `folder`, where the first process that needs it writes it.

    Equal keys must mean equal arrays. Without a folder nothing is kept.
    """
    path = None if folder is None else folder / f"{key}.npy"
    if path is not None and path.is_file():
        mapped: NDArray[Any] = np.load(path, mmap_mode="r")
        return mapped
    array = build()
    if path is None or not worth_a_file(array.nbytes):
        return array
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    with temporary.open("wb") as file:
        np.save(file, array)
    os.replace(temporary, path)
    del array
    mapped = np.load(path, mmap_mode="r")
    return mapped


def write_json(path: Path, value: Any) -> None:
    """Write `value` so that a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    temporary.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def publish_folder(temporary: Path, folder: Path) -> None:
    """Give a finished folder its final name, unless another process was first."""
    try:
        os.rename(temporary, folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(temporary)
