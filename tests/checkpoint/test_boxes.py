"""Flat ranges of parameters as boxes of Hugging Face tensors, both ways."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.checkpoint.boxes import tensor_boxes
from hybrid.config.parallel import Shard
from hybrid.tensor_parallel.params import Segment


@st.composite
def parameters(draw: st.DrawFn) -> tuple[list[Segment], tuple[int, ...], int]:
    """Segments of a parameter, its shape, and how many elements are padding."""
    columns = draw(st.integers(1, 7))
    flat = draw(st.booleans())
    if not flat and draw(st.booleans()):
        rows, before, after = draw(st.integers(1, 6)), draw(st.integers(0, 4)), draw(st.integers(0, 4))
        size = before + columns + after
        segment = Segment("columns", (rows, size), 1, Shard(size, before, before + columns))
        return [segment], (rows, columns), 0
    segments, offset = [], 0
    for index in range(draw(st.integers(1, 3))):
        length, before, after = draw(st.integers(0, 5)), draw(st.integers(0, 4)), draw(st.integers(0, 4))
        size = before + length + after
        shape = (size,) if flat else (size, columns)
        segments.append(Segment(f"rows{index}", shape, 0, Shard(size, before, before + length), offset))
        offset += length
    padding = draw(st.integers(0, 3)) + (offset == 0)
    rows = offset + padding
    return segments, (rows,) if flat else (rows, columns), padding * (1 if flat else columns)


@given(parameters(), st.data())
def test_cutting_and_putting_together_again(
    parameter: tuple[list[Segment], tuple[int, ...], int], data: st.DataObject
) -> None:
    segments, shape, padding = parameter
    wholes = {segment.hf_name: torch.randint(1, 1000, segment.hf_shape) for segment in segments}
    param = torch.zeros(shape, dtype=torch.int64)
    for segment in segments:
        param[segment.local] = wholes[segment.hf_name][segment.source]
    numel = param.numel()
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), max_size=4)))
    found = {name: torch.zeros_like(whole) for name, whole in wholes.items()}
    rebuilt = torch.zeros(numel, dtype=torch.int64)
    covered = 0
    for start, stop in zip([0, *cuts], [*cuts, numel], strict=True):
        boxes = tensor_boxes(segments, shape, start, stop)
        for segment in segments:
            assert sum(box.segment is segment for box in boxes) <= 3
        assert [box.start for box in boxes] == sorted(box.start for box in boxes)
        for box in boxes:
            assert start <= box.start < box.stop <= stop
            whole = wholes[box.segment.hf_name]
            piece = param.flatten()[box.start : box.stop].view(box.shape)
            assert torch.equal(piece, whole[box.index])
            assert not found[box.segment.hf_name][box.index].any()  # no element twice
            found[box.segment.hf_name][box.index] = piece
            rebuilt[box.start : box.stop] = whole[box.index].flatten()
            covered += box.numel
    assert covered == numel - padding
    assert torch.equal(rebuilt.view(shape), param)
    for segment in segments:
        assert torch.equal(found[segment.hf_name][segment.source], wholes[segment.hf_name][segment.source])
