"""Jobs on threads: copying, checksums and casts all leave the interpreter's lock alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")

Check = Callable[[], None]
"""To be called often by a job: it ends the job once another has failed."""


class _Stopped(Exception):
    """Another job failed."""


def run_all(call: Callable[[T, Check], None], jobs: Iterable[T], workers: int) -> None:
    """`call(job, check)` for every job, `workers` at a time; the first error ends all of them and is raised."""
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise _Stopped

    with ThreadPoolExecutor(max_workers=workers) as pool:
        futures = [pool.submit(call, job, check) for job in jobs]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            # An interrupt comes here too: the workers must not go on with gigabytes.
        finally:
            stop.set()
            for future in futures:
                future.cancel()
    errors = [error for future in done if (error := future.exception()) and not isinstance(error, _Stopped)]
    if errors:
        raise errors[0]
