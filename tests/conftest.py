"""Fixtures that every test file may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

# Before torch is imported by any test file: two threads on a busy core are slower than one, and no test may go online.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from support.pool import WorkerPool
from support.smollm2 import write_smollm2


def pytest_report_header() -> str:
    names = ("torch", "deepspeed", "transformers", "datasets", "accelerate", "safetensors", "numpy")
    return "versions: " + ", ".join(f"{name} {version(name)}" for name in names)


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """The session's gloo workers; `pool.run(fn, world_size, *args)` returns the results by rank."""
    workers = WorkerPool(size=4)
    try:
        yield workers
    finally:
        workers.close()


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with real weights, in several files; nobody writes to it."""
    return write_smollm2(tmp_path_factory.mktemp("smollm2"))
