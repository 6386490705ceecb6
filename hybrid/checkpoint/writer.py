"""Writes checkpoints in a thread: each rank its files, then rank 0 the manifest that makes the whole complete.

The threads of different ranks meet in the staging folder only, where each leaves a `rank-N.done`: collectives belong to
the main thread.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from hybrid.checkpoint.directory import commit, prune, write_durably
from hybrid.checkpoint.host import HostBuffer, HostBuffers
from hybrid.checkpoint.parts import Part
from hybrid.checkpoint.rng import rng_file
from hybrid.convert.files import sync
from hybrid.convert.manifest import FileRecord, Manifest
from hybrid.convert.sharded import whole_file
from hybrid.convert.store import CHUNK_BYTES, raw_array
from hybrid.convert.writer import TensorFileWriter

logger = logging.getLogger(__name__)

COMMIT_TIMEOUT = 1800.0
"""Seconds rank 0 waits for the files of the other ranks after its own."""

_POLL = 0.02
_SLOWEST_POLL = 0.5


class Cancelled(Exception):
    """Another rank's part of the checkpoint failed."""


@dataclass(kw_only=True)
class Job:
    """One rank's part of one checkpoint."""

    step: int
    staging: Path
    name: str
    """The beginning of this rank's file names."""
    buffer: HostBuffer
    """Holds the data of `parts`."""
    parts: Sequence[Part] = ()
    rng: str = ""
    """This rank's random states, as JSON text."""
    beside: Callable[[Path], None] = lambda staging: None
    """Rank 0: writes what lies beside the tensors."""
    manifest: Manifest | None = None
    """Rank 0: the manifest, still without files."""
    error: str | None = None
    reported: bool = False
    started: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    written: threading.Event = field(default_factory=threading.Event)
    """This rank's files are on disk, or given up."""
    finished: threading.Event = field(default_factory=threading.Event)
    """Also the checkpoint, on rank 0, is complete or given up."""

    def give_up(self) -> None:
        """Some rank has failed: write no more of it."""
        self.reported = True
        self.cancelled.set()
        if self.started.is_set():
            self.finished.wait()


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which complete checkpoints stay."""

    keep_last: int = 0
    keep_every: int = 0


class BackgroundWriter:
    """One thread that writes this rank's part of one checkpoint after the other."""

    def __init__(self, root: Path, rank: int, world_size: int, retention: Retention) -> None:
        self.buffers = HostBuffers()
        self.committed: int | None = None
        """Rank 0: the step of the newest checkpoint that this run has completed."""
        self._root, self._rank, self._world_size, self._retention = root, rank, world_size, retention
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, name="checkpoint", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Write it when those before it are written."""
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread when all that was submitted is done with."""
        self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(job)

    def _do(self, job: Job) -> None:
        start = time.perf_counter()
        job.started.set()
        try:
            try:
                self._write(job)
            finally:
                job.parts = ()
                self.buffers.give_back(job.buffer)
            job.written.set()
            if self._rank == 0:
                nbytes = self._complete(job)
                seconds = time.perf_counter() - start
                logger.info("checkpoint of step %d: %.3g GB written in %.1f s", job.step, nbytes / 1e9, seconds)
        except Cancelled:
            self._discard(job)
        except Exception as error:
            self._discard(job)
            job.error = str(error) or type(error).__name__
        finally:
            job.written.set()
            job.finished.set()

    def _write(self, job: Job) -> None:
        """This rank's files, and then the word that they are on disk."""
        if job.cancelled.is_set():
            raise Cancelled
        files: dict[int, list[Part]] = defaultdict(list)
        for part in job.parts:
            files[part.file].append(part)
        records = {}
        for number, parts in files.items():
            name = f"{job.name}-{number}.safetensors"
            records[name] = self._write_file(job, job.staging / name, parts)
        rng = rng_file(self._rank)
        write_durably(job.staging / rng, job.rng)
        records[rng] = whole_file(job.staging / rng)
        done = {name: asdict(record) for name, record in records.items()}
        temporary = job.staging / f".{_done(self._rank)}"
        write_durably(temporary, json.dumps(done))
        temporary.rename(job.staging / _done(self._rank))
        sync(job.staging)

    def _write_file(self, job: Job, path: Path, parts: Sequence[Part]) -> FileRecord:
        tensors = [(part.key, part.data.dtype, part.shape) for part in parts]
        writer = TensorFileWriter(path, tensors, {part.key: part.offset for part in parts})
        try:
            for part in parts:
                if job.cancelled.is_set():
                    raise Cancelled
                raw = raw_array(part.data)
                step = CHUNK_BYTES // raw.itemsize
                writer.write(part.key, (raw[start : start + step] for start in range(0, raw.size, step)))
            record = writer.finish()
        finally:
            writer.close()
        sync(path)
        return record

    def _complete(self, job: Job) -> int:
        """Wait for every rank, then commit; the bytes of the checkpoint."""
        assert job.manifest is not None, "rank 0 gets one"
        self._await_ranks(job)
        files: dict[str, FileRecord] = {}
        for rank in range(self._world_size):
            path = job.staging / _done(rank)
            files |= {name: FileRecord(**record) for name, record in json.loads(path.read_text()).items()}
            path.unlink()
        job.beside(job.staging)
        for path in sorted(job.staging.rglob("*")):
            name = str(path.relative_to(job.staging))
            if path.is_file() and name not in files:
                files[name] = whole_file(path)
                sync(path)
        if job.cancelled.is_set():
            raise Cancelled
        commit(self._root, job.step, replace(job.manifest, files=files).to_json())
        self.committed = job.step
        self._prune()
        return sum(record.size for record in files.values())

    def _prune(self) -> None:
        try:
            for path in prune(self._root, self._retention.keep_last, self._retention.keep_every):
                logger.info("deleted the old checkpoint %s", path.name)
        except OSError as error:
            logger.warning("an old checkpoint could not be deleted: %s", error)

    def _await_ranks(self, job: Job) -> None:
        deadline, pause = time.monotonic() + COMMIT_TIMEOUT, _POLL
        waiting = {_done(rank) for rank in range(self._world_size)}
        while waiting := waiting - {path.name for path in job.staging.iterdir()}:
            if job.cancelled.is_set():
                raise Cancelled
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {COMMIT_TIMEOUT:.0f} s there is no {', '.join(sorted(waiting))}")
            time.sleep(pause)
            pause = min(2 * pause, _SLOWEST_POLL)

    def _discard(self, job: Job) -> None:
        """Free what this rank has written, so that a full disk does not stay full."""
        names = [*(path.name for path in job.staging.glob(f"{job.name}-*")), _done(self._rank), rng_file(self._rank)]
        for name in names:
            (job.staging / name).unlink(missing_ok=True)


def _done(rank: int) -> str:
    return f"rank-{rank}.done"
