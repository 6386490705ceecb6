"""When a launch ends before its run is complete."""

from __future__ import annotations

import time

from hybrid.config.training import TrainingConfig
from hybrid.signals import EXIT_STOPPED, StopSignals


class Limits:
    """Signals and wall time, which any rank may see first and all must agree on, and the number of steps.

    Made early: the wall time counts from here.
    """

    def __init__(self, training: TrainingConfig, signals: StopSignals | None) -> None:
        self._steps_left = training.stop_after_steps
        self._wall_time = training.max_wall_time
        self._start = time.monotonic()
        self._signals = signals
        self._asked = False

    @property
    def asked(self) -> bool:
        """Whether this rank knows a reason to end."""
        return self._late or (self._signals is not None and self._signals.received is not None)

    @property
    def _late(self) -> bool:
        return self._wall_time is not None and time.monotonic() - self._start > self._wall_time

    def count_step(self, asked: bool) -> None:
        """A step is done; `asked` says whether any rank was asked to end. Alike on every rank."""
        self._asked = self._asked or asked
        if self._steps_left is not None:
            self._steps_left -= 1

    @property
    def reached(self) -> bool:
        """Whether this launch ends now; alike on every rank."""
        return self._asked or self._steps_left == 0

    @property
    def exit_code(self) -> int:
        """Of a launch that ended early: whoever asked for it wants to know, who limited the steps does."""
        return EXIT_STOPPED if self._asked else 0

    @property
    def reason(self) -> str:
        """Why it ended, for the log."""
        if not self._asked:
            return "hybrid.training.stop_after_steps is reached"
        if self._signals is not None and self._signals.received is not None:
            return f"{self._signals.received.name} was received"
        return "hybrid.training.max_wall_time is over" if self._late else "another rank was asked to end"
