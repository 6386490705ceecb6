"""SIGTERM and SIGUSR1 as a wish to save and end; a second one ends the process at once.

A thread reads the signals from a pipe that the interpreter's C handler fills: the main thread may be inside a
collective, where it runs no Python handler for a long time.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Self

STOPPING = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send before they kill; Slurm's `--signal=USR1@300` is a warning 300 s ahead."""

EXIT_STOPPED = 75
"""Exit code of a launch that was asked to end, and has saved: EX_TEMPFAIL of sysexits.h, "try again later"."""

_SAME_REQUEST = 0.5
"""Seconds in which further signals count as the first: a launcher forwards what the scheduler sends to all."""


class StopSignals:
    """Catches the signals in a `with` block; use it in the main thread."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first signal."""

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = {number: signal.signal(number, _ignore) for number in STOPPING}
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    def _listen(self) -> None:
        first = 0.0
        while numbers := os.read(self._read, 64):
            for number in numbers:
                if number not in STOPPING:
                    continue
                if self.received is None:
                    self.received, first = signal.Signals(number), time.monotonic()
                elif time.monotonic() - first > _SAME_REQUEST:
                    os._exit(128 + number)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The thread acts."""
