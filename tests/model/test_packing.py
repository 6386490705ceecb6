"""Positions and mask of packed documents."""

import torch

from hybrid.model.packing import segment_mask, segment_positions, segment_rope

SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 2, 2, 2, 2]])


def test_positions_start_anew():
    assert segment_positions(SEGMENTS).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]]


def test_mask_is_causal_and_within_documents():
    mask = segment_mask(SEGMENTS)
    assert mask.shape == (2, 1, 6, 6) and mask.dtype == torch.bool
    for row, segments in enumerate(SEGMENTS.tolist()):
        for query in range(6):
            for key in range(6):
                seen = key <= query and segments[key] == segments[query]
                assert mask[row, 0, query, key].item() == seen


def test_rope_is_taken_at_the_document_positions():
    tables = torch.arange(6.0).unsqueeze(1).expand(6, 4), torch.zeros(6, 4)
    cos, _ = segment_rope(tables, SEGMENTS)
    assert cos.shape == (6, 2, 4)
    assert cos[:, 0, 0].tolist() == [0, 1, 2, 0, 1, 0]
