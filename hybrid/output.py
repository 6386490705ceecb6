"""What a script prints for whoever reads it: a reader may leave, and a disk may be full."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def say(text: str) -> None:
    """Print to standard output, at once. Call it in the main thread.

    A reader that has seen enough, as `| head`, ends this process. Where nothing can be written, one line on standard
    error says so.

    Raises:
        SystemExit: with code 1, where nothing can be written.
    """
    try:
        with _readers_choice():
            print(text, flush=True)
    except OSError as error:
        # What is still in the buffer would fail again when the interpreter ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        program = Path(sys.argv[0]).name
        print(f"{program}: standard output cannot be written ({error.strerror})", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


@contextmanager
def _readers_choice() -> Iterator[None]:
    """While this process only prints: let the reader of its output end it by ending itself."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGPIPE, before)
