"""The order of a rank's passes: pure arithmetic (Narayanan et al. 2021, arXiv:2104.04473, section 2.2)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

Pass = tuple[int, int]
"""(chunk, microbatch): one of a rank's stages, counted in the order of the model, and what goes through it."""
Round = tuple[Pass | None, Pass | None]
"""A forward and a backward, of which one may be missing."""

SENDS_AHEAD = 2
"""Messages to a neighbour under way at most: it has posted the receive of the first, and with that posts the second."""


def forward_passes(micro_batches: int, ranks: int, chunks: int) -> list[Pass]:
    """The forwards of a rank, alike on all: `ranks` microbatches at a time through every chunk."""
    return list(_passes(micro_batches, ranks, range(chunks)))


def pipeline_rounds(micro_batches: int, ranks: int, rank: int, chunks: int) -> list[Round]:
    """What a rank computes: forwards that fill the pipeline, one forward and one backward at a time, and what is left.

    Backwards come in the order of the forwards with the chunks reversed.
    """
    forwards = forward_passes(micro_batches, ranks, chunks)
    behind = ranks - 1 - rank
    # The first output goes through the v - 1 chunks before the last on all p ranks, then through the ranks behind this
    # one, and its gradient comes back the same way. With one chunk the way out is enough: what comes in then has been
    # made while the gradient came back.
    filling = behind if chunks == 1 else min(2 * behind + (chunks - 1) * ranks, len(forwards))
    first: list[Round] = [(forward, None) for forward in forwards[:filling]]
    return first + list(zip_longest(forwards[filling:], _passes(micro_batches, ranks, range(chunks - 1, -1, -1))))


def _passes(micro_batches: int, ranks: int, chunks: range) -> Iterator[Pass]:
    for start in range(0, micro_batches, ranks):
        group = range(start, min(start + ranks, micro_batches))
        yield from ((chunk, micro_batch) for chunk in chunks for micro_batch in group)
