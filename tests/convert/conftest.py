"""What the conversion's tests share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Hundreds of small directories are written here, and no test cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
