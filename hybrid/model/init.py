"""Initial weights as a function of the seed and the Hugging Face name alone, whatever the layout."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import nn

from hybrid.tensor_parallel.params import named_segments

BLOCK = 512
"""Side of the square blocks a matrix is drawn in; each has its own generator, so a rank draws only those it needs."""


def _block_seed(seed: int, hf_name: str, row: int, column: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{hf_name}/{row}/{column}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _bounds(part: slice, size: int) -> tuple[int, int]:
    start, stop, step = part.indices(size)
    assert step == 1, "a rank holds consecutive rows or columns"
    return start, max(start, stop)


def initial_tensor(
    seed: int, hf_name: str, shape: Sequence[int], std: float, index: Sequence[slice] | None = None
) -> torch.Tensor:
    """`full[index]`, fp32 on the CPU, of the [rows, columns] matrix `full` with independent N(0, std^2) entries.

    `full` depends on `seed`, `hf_name`, `shape` and `std` only. Of the blocks it is drawn in, only those that `index`
    (as `Segment.source`) touches are drawn.
    """
    rows, columns = shape
    row_part, column_part = (*(index or ()), slice(None), slice(None))[:2]
    (top, bottom), (left, right) = _bounds(row_part, rows), _bounds(column_part, columns)
    out = torch.empty(bottom - top, right - left)
    generator = torch.Generator()
    for y in range(top // BLOCK * BLOCK, bottom, BLOCK):
        for x in range(left // BLOCK * BLOCK, right, BLOCK):
            generator.manual_seed(_block_seed(seed, hf_name, y, x))
            block = torch.empty(min(BLOCK, rows - y), min(BLOCK, columns - x)).normal_(0.0, std, generator=generator)
            y0, y1, x0, x1 = max(y, top), min(y + BLOCK, bottom), max(x, left), min(x + BLOCK, right)
            out[y0 - top : y1 - top, x0 - left : x1 - left] = block[y0 - y : y1 - y, x0 - x : x1 - x]
    return out


@torch.no_grad()
def init_parameters(module: nn.Module, seed: int, std: float) -> None:
    """Fill every parameter of the layers in `module`: matrices N(0, std^2), norms 1, biases 0, padding 0."""
    for param in module.parameters():
        param.zero_()
    for param, segment in named_segments(module):
        if len(segment.hf_shape) == 2:
            values = initial_tensor(seed, segment.hf_name, segment.hf_shape, std, segment.source)
            param[segment.local] = values.to(param)
        elif segment.hf_name.endswith(".weight"):
            param[segment.local] = 1.0
