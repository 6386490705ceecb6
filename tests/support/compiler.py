"""Tests that compile operators on a CPU."""

from __future__ import annotations

import shutil

import pytest

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="torch.compile needs a C++ compiler on a CPU",
)
