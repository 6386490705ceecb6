"""A global batch that grows in steps at the start of training, as Megatron's `--rampup-batch-size`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchRampup:
    """The global batch size as a function of the samples consumed, so that it does not depend on the layout.

    It begins at `start` and grows by `increment` at even distances over the first `samples` samples, up to `final`.
    """

    start: int
    increment: int
    samples: int
    final: int

    def __post_init__(self) -> None:
        if self.start < 1 or self.increment < 1 or self.samples < 0:
            raise ValueError(f"batch ramp-up {self} must have a positive start and increment, and samples of 0 or more")
        if self.start > self.final or (self.final - self.start) % self.increment:
            raise ValueError(
                f"batch ramp-up from {self.start} by {self.increment} does not arrive at the global batch size "
                f"{self.final}; choose an increment that divides {self.final - self.start}"
            )

    @property
    def stages(self) -> list[int]:
        """Every batch size, in order."""
        return list(range(self.start, self.final + 1, self.increment))

    def check(self, micro_batch_size: int, dp_size: int) -> None:
        """Refuse sizes that a layout cannot cut into microbatches.

        Raises:
            ValueError: a stage is no multiple of micro_batch_size x dp_size.
        """
        unit = micro_batch_size * dp_size
        odd = [size for size in self.stages if size % unit]
        if odd:
            raise ValueError(
                f"batch ramp-up sizes {odd} are no multiples of micro batch {micro_batch_size} x data-parallel size "
                f"{dp_size} = {unit}; choose a start and an increment that are"
            )

    def global_batch_size(self, samples_consumed: int) -> int:
        """Size of the step that begins when so many samples were consumed."""
        steps = (self.final - self.start) // self.increment
        if samples_consumed >= self.samples or steps == 0:
            return self.final
        return min(self.final, self.start + samples_consumed * steps // self.samples * self.increment)

    def samples_after(self, train_steps: int) -> int:
        """Samples consumed by so many steps."""
        consumed = step = 0
        while step < train_steps and (size := self.global_batch_size(consumed)) < self.final:
            consumed += size
            step += 1
        return consumed + (train_steps - step) * self.final
