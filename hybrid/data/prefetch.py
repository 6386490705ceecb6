"""A thread that reads ahead."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
_POLL = 0.1


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class _End:
    """The iterator is exhausted."""


def _fill(items: Iterator[T], ready: queue.Queue[T | _Failure | _End], stop: threading.Event) -> None:
    """The thread's work; it holds no reference to the Prefetcher, so dropping that ends the thread."""

    def put(item: T | _Failure | _End) -> None:
        while not stop.is_set():
            try:
                ready.put(item, timeout=_POLL)
                return
            except queue.Full:
                continue

    try:
        for item in items:
            put(item)
            if stop.is_set():
                return
        put(_End())
    except BaseException as error:
        put(_Failure(error))


class Prefetcher(Generic[T]):
    """An iterator over `items` that a background thread keeps up to `depth` items ahead.

    What the thread raises is raised by `__next__`, at the item it would have given, and by every call after.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._ready: queue.Queue[T | _Failure | _End] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._finished: _Failure | _End | None = None
        work = (items, self._ready, self._stop)
        self._thread = threading.Thread(target=_fill, args=work, name="prefetch", daemon=True)
        weakref.finalize(self, self._stop.set)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._stop.is_set():
            raise RuntimeError("the prefetcher is closed")
        item = self._ready.get() if self._finished is None else self._finished
        if isinstance(item, _Failure):
            self._finished = item
            raise item.error
        if isinstance(item, _End):
            self._finished = item
            raise StopIteration
        return item

    def close(self) -> None:
        """End the thread; harmless if called twice."""
        self._stop.set()
        self._thread.join()
