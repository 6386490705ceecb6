"""Microbatches as the engine reads them: where the data are at fault, every rank ends alike."""

from __future__ import annotations

from collections.abc import Iterator

import torch

Batch = tuple[torch.Tensor, ...]
"""Token ids and shifted labels, of packed documents also positions and segment numbers; each [b, s] int64."""


class Reader:
    """Takes the place of data that end within a step, or change their shape, with microbatches that supervise nothing.

    A rank that raised instead would leave its peers waiting for what it sends. So the step goes to its end, where all
    ranks tell each other whether one had a `fault`, and raise before anything is updated.

    Args:
        blank: tokens and labels to go on with where there never were any.
        one_shape: whether all microbatches have to be of the first one's shape, as stages of a pipeline agree on it.
    """

    def __init__(self, blank: Batch, *, one_shape: bool) -> None:
        self.fault: str | None = None
        """What is wrong with the data."""
        self._blank, self._one_shape = blank, one_shape
        self._shape: torch.Size | None = None

    def take(self, batches: Iterator[Batch]) -> Batch:
        """The next microbatch, or a blank one."""
        batch = next(batches, None)
        if batch is None:
            self.fault = self.fault or "the data end within a step, or an evaluation: give whole ones"
            return self._blank
        if self._shape is None:
            self._shape = batch[0].shape
            self._blank = (batch[0], torch.full_like(batch[1], -100), *batch[2:])
        if self._one_shape and batch[0].shape != self._shape:
            other, first = (" x ".join(map(str, shape)) for shape in (batch[0].shape, self._shape))
            self.fault = self.fault or (
                f"a microbatch of {other} tokens follows those of {first}: under a pipeline all have one, so pad them"
            )
            return self._blank
        return batch
