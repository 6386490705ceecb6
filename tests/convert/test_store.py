"""Any slice of any tiling, whole or in chunks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hybrid.convert.errors import CheckpointError
from hybrid.convert.store import (
    ArrayPiece,
    FilePiece,
    Piece,
    StoredTensor,
    TensorFile,
    TensorStore,
    box_of,
    raw_array,
    whole,
)
from hybrid.convert.tensorfile import read_header

SHAPE = (12, 10)
VALUES = torch.arange(math.prod(SHAPE), dtype=torch.int32).view(SHAPE).view(torch.float32)


def tiling(folder, rows, columns, on_disk):
    """VALUES cut at `rows` and `columns`."""
    grid = [
        (y, x)
        for y in zip([0, *rows], [*rows, SHAPE[0]], strict=True)
        for x in zip([0, *columns], [*columns, SHAPE[1]], strict=True)
    ]
    pieces = []
    for number, ((top, bottom), (left, right)) in enumerate(grid):
        part = VALUES[top:bottom, left:right].contiguous()
        data = ArrayPiece(part)
        if on_disk:
            path = folder / f"{number}.safetensors"
            save_file({"x": part}, path)
            data = FilePiece(TensorFile(path), read_header(path).entries["x"])
        pieces.append(Piece((top, left), tuple(part.shape), data))
    return TensorStore({"x": StoredTensor(torch.float32, SHAPE, tuple(pieces))})


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_box(tmp_path_factory, data):
    cuts = [sorted(data.draw(st.sets(st.integers(1, size - 1), max_size=3))) for size in SHAPE]
    store = tiling(tmp_path_factory.mktemp("pieces"), *cuts, on_disk=data.draw(st.booleans()))
    assert store.tensors["x"].problem() is None
    index = tuple(slice(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in SHAPE)
    assert torch.equal(store.read("x", index).view(torch.int32), VALUES[index].view(torch.int32))
    chunks = store.chunks("x", box_of(index, SHAPE), chunk_bytes=data.draw(st.integers(1, 200)))
    flat = np.concatenate([np.empty(0, np.uint32), *(chunk.reshape(-1).copy() for chunk in chunks)])
    assert np.array_equal(flat, raw_array(VALUES[index].contiguous()).reshape(-1))


def test_pieces_that_are_not_the_tensor():
    def stored(*boxes):
        pieces = [Piece(offset, shape, ArrayPiece(torch.zeros(shape))) for offset, shape in boxes]
        return StoredTensor(torch.float32, (4, 2), tuple(pieces))

    assert stored(((0, 0), (2, 2)), ((2, 0), (2, 2))).problem() is None
    assert stored(((0, 0), (2, 2)), ((3, 0), (1, 2))).problem() == "its slices hold 6 of 8 elements"
    assert stored(((0, 0), (3, 2)), ((2, 0), (2, 2))).problem() == "two of its slices overlap"


def test_no_file_is_opened_before_it_is_needed(tmp_path):
    store = tiling(tmp_path, [4, 8], [], on_disk=True)
    store.read("x", (slice(5, 7),))
    assert [piece.data.file.opened for piece in store.tensors["x"].pieces] == [False, True, False]


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    store = tiling(tmp_path, [], [], on_disk=True)
    path = store.tensors["x"].pieces[0].data.file.path
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="it ended at byte"):
        store.read("x")


def test_a_missing_dim_is_taken_whole():
    assert box_of((slice(1, 3),), (4, 5)) == ((1, 3), (0, 5)) and whole((4, 5)) == ((0, 4), (0, 5))
