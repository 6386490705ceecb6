"""Bitwise comparison of stored tensors."""

from __future__ import annotations

import math

import numpy as np

from hybrid.convert.store import TensorStore, whole


def first_difference(one: TensorStore, name: str, other: TensorStore, other_name: str) -> str | None:
    """Where two tensors differ first, in words, or None if they are the same bit for bit."""
    a, b = one.tensors[name], other.tensors[other_name]
    if a.shape != b.shape:
        return f"shape {list(a.shape)} and {list(b.shape)}"
    if a.dtype != b.dtype:
        return f"{a.dtype} and {b.dtype}"
    done = 0
    for left, right in zip(one.chunks(name, whole(a.shape)), other.chunks(other_name, whole(b.shape)), strict=True):
        if not np.array_equal(left, right):
            flat = int(np.flatnonzero((left != right).reshape(-1))[0])
            place = np.unravel_index(done + flat, a.shape)
            return f"first at {[int(n) for n in place]}"
        done += math.prod(left.shape)
    return None
