"""What tests take from the package index, kept between runs; without it they are skipped, and say why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid.data.cache import default_cache_dir

TIMEOUT = 240
"""Seconds for pip."""


def pip(name: str, *words: str) -> Path:
    """The folder that `pip *words` with a folder added has filled, now or in an earlier run."""
    folder = Path(default_cache_dir()) / "tests" / name
    if folder.is_dir():
        return folder
    partial = folder.with_name(f"{name}.{os.getpid()}")
    partial.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words, str(partial)]
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=TIMEOUT)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            pytest.skip(f"pip cannot get {name}: {reason}")
        if not folder.exists():
            partial.rename(folder)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip cannot get {name} in {TIMEOUT} s")
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
