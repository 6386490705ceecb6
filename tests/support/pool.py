"""A session-wide pool of gloo worker processes that runs the distributed tests.

Starting a process costs seconds (importing torch and DeepSpeed): the workers are forked from one server that has
imported both, when a test first needs them, and serve one call after the other.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from support.worker import DUMP_SIGNAL, ENVIRONMENT, Call, Failure, serve

from hybrid.environment import free_port

GRACE = 3.0
"""Seconds the other ranks get to finish once one has failed."""

STACK_WAIT = 0.5
"""Seconds the workers get to write their stacks."""


class WorkerError(RuntimeError):
    """A rank failed with an exception that cannot be pickled, or died."""


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@dataclass(frozen=True)
class _Worker:
    process: ForkServerProcess
    connection: Connection
    stack_file: Path

    def kill(self) -> None:
        pid = self.process.pid
        assert pid is not None, "a worker is in the list once it has started"
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == pid:  # until then the worker is in the server's session
                os.killpg(pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.connection.close()


class WorkerPool:
    """Up to `size` workers, started when first needed; worker i is rank i of each call."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._workers: list[_Worker] = []
        self._folder: Path | None = None
        # Registered after multiprocessing's own exit handler, so run before it: that one waits for living children.
        atexit.register(self.close)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def run(
        self, fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """`fn(*args, **kwargs)` on ranks 0..world_size-1 with torch.distributed initialised; the results by rank.

        Each call gets a fresh default group, torch seed 0 and the environment variables a launcher sets. `fn` is
        a function (or static method) at module level; arguments and results are pickled by value.

        Raises:
            ValueError: more ranks than workers, or a function that has no name at module level.
            TimeoutError: a rank took longer than `timeout` seconds; the message has the stacks of all ranks.
            WorkerError: a rank died, or raised something that cannot be pickled.
            BaseException: whatever the first rank to fail raised, with its rank and traceback as a note.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(f"a world of {world_size} ranks: the pool has {self.size} workers")
        call = self._prepare(fn, world_size, args, kwargs, timeout)
        self._grow(world_size)
        ranks = self._workers[:world_size]
        failed = True
        try:
            for worker in ranks:
                worker.connection.send(call)
            results = self._collect(ranks, time.monotonic() + timeout, timeout)
            failed = False
        finally:
            if failed:  # also on KeyboardInterrupt and pytest-timeout: the workers are in an unknown state
                self.close_workers()
        for worker in ranks:
            with contextlib.suppress(BrokenPipeError):  # it died: the next call starts another
                worker.connection.send(None)
        self._raise_first(results)
        return [pickle.loads(payload) for _, payload in sorted(results.items())]

    def _prepare(
        self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float
    ) -> Call:
        path = inspect.getsourcefile(inspect.unwrap(fn))
        if path is None or "<" in fn.__qualname__:
            raise ValueError(f"{fn.__qualname__} must be a function at module level of a source file")
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="pool-"))
        return Call(
            path=os.path.abspath(path),
            module=fn.__module__,
            qualname=fn.__qualname__,
            payload=pickle.dumps((args, kwargs)),
            world_size=world_size,
            store=str(self._folder / uuid.uuid4().hex),
            port=free_port(),
            timeout=timeout,
        )

    def _grow(self, count: int) -> None:
        if any(not worker.process.is_alive() for worker in self._workers):
            self.close_workers()
        if len(self._workers) >= count:
            return
        assert self._folder is not None, "a call has been prepared"
        context = multiprocessing.get_context("forkserver")
        with _environment(ENVIRONMENT):
            context.set_forkserver_preload(["torch", "deepspeed"])
            multiprocessing.forkserver.ensure_running()
        while len(self._workers) < count:
            rank = len(self._workers)
            stack_file = self._folder / f"stacks-{uuid.uuid4().hex}"
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, theirs, str(stack_file)), name=f"rank {rank}")
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, stack_file))

    def _collect(self, ranks: list[_Worker], deadline: float, timeout: float) -> dict[int, Any]:
        """The payload of each rank, failures first in time first."""
        results: dict[int, Any] = {}
        first_failure: tuple[int, Failure] | None = None
        while len(results) < len(ranks):
            missing = {worker.connection: rank for rank, worker in enumerate(ranks) if rank not in results}
            ready = wait(list(missing), timeout=max(0.0, deadline - time.monotonic()))
            if not ready and first_failure is not None:
                raise _error(*first_failure, f"ranks {sorted(missing.values())} did not finish and were killed")
            if not ready:
                raise TimeoutError(
                    f"ranks {sorted(missing.values())} took longer than {timeout} s\n{self._dump_stacks(ranks)}"
                )
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = missing[connection]
                try:
                    kind, payload = connection.recv()
                except EOFError:
                    ranks[rank].process.join(1)
                    payload = _death(ranks[rank].process.exitcode)
                    kind = "failure"
                results[rank] = payload
                if kind == "failure" and first_failure is None:
                    first_failure = rank, payload
                    deadline = min(deadline, time.monotonic() + GRACE)
        return results

    def _raise_first(self, results: dict[int, Any]) -> None:
        failures = [(rank, payload) for rank, payload in results.items() if isinstance(payload, Failure)]
        if not failures:
            return
        others = "\n".join(f"rank {rank}: {failure.summary}" for rank, failure in failures[1:])
        raise _error(*failures[0], others)

    def _dump_stacks(self, ranks: list[_Worker]) -> str:
        for worker in ranks:
            if worker.process.is_alive() and worker.stack_file.exists():  # exists: the handler is installed
                os.kill(worker.process.pid or 0, DUMP_SIGNAL)
        time.sleep(STACK_WAIT)
        found = [worker.stack_file.read_text() if worker.stack_file.exists() else "" for worker in ranks]
        return "\n".join(f"--- rank {rank} ---\n{text.strip() or 'no stack'}" for rank, text in enumerate(found))

    def close_workers(self) -> None:
        """Kill the workers; the next call starts new ones."""
        while self._workers:
            self._workers.pop().kill()

    def close(self) -> None:
        """Kill the workers and remove the pool's files."""
        self.close_workers()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _death(exitcode: int | None) -> Failure:
    summary = f"WorkerError: the process died with exit code {exitcode}"
    return Failure(pickled=None, summary=summary, traceback=summary)


def _error(rank: int, failure: Failure, others: str) -> BaseException:
    error: BaseException
    if failure.pickled is None:
        error = WorkerError(failure.summary)
    else:
        error = pickle.loads(failure.pickled)
    error.add_note(f"raised by rank {rank}:\n{failure.traceback}" + (f"\n{others}" if others else ""))
    return error
