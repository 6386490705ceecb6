"""Saves a run's state while it goes on."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from hybrid.agreement import everyone, rank_zero_only
from hybrid.checkpoint import directory
from hybrid.checkpoint.host import HostBuffers
from hybrid.checkpoint.parts import saved_parts
from hybrid.checkpoint.progress import Progress
from hybrid.checkpoint.rng import rng_state
from hybrid.checkpoint.writer import BackgroundWriter, Job, Retention
from hybrid.config.model import LlamaConfig
from hybrid.config.run import RunConfig
from hybrid.convert.errors import CheckpointError
from hybrid.convert.files import write_json
from hybrid.convert.manifest import SHARDED, TRAINING_FILE, Layout
from hybrid.convert.sharded import make_manifest
from hybrid.grid import Grid
from hybrid.optim.engine import HybridEngine

logger = logging.getLogger(__name__)

SaveTokenizer = Callable[[Path], object]
"""Writes the tokenizer's files into a folder."""


class Checkpointer:
    """The checkpoints of one run; every rank makes one. Most methods are collective calls."""

    def __init__(
        self,
        run: RunConfig,
        grid: Grid,
        save_tokenizer: SaveTokenizer | None = None,
        model: LlamaConfig | None = None,
    ) -> None:
        """Args:
        model: as whoever converts a checkpoint gets it, which may stop at other tokens than the run's own.
        """
        self.root = Path(run.hybrid.training.output_dir) / directory.FOLDER
        self._run, self._grid, self._settings = run, grid, run.hybrid.checkpoint
        self._save_tokenizer = save_tokenizer
        self._model = model or run.model
        retention = Retention(keep_last=self._settings.keep_last, keep_every=self._settings.keep_every)
        self._writer = BackgroundWriter(self.root, grid.rank, grid.world_size, retention)
        self._name = f"model-pp{grid.pipe_rank:02d}-tp{grid.tensor_rank:02d}-dp{grid.data_rank:02d}"
        self._jobs: list[Job] = []
        self._settled: list[Job] = []
        self._failures: list[int] = []

    def start_after(self, step: int) -> None:
        """Make room for a run that goes on after `step`: what was left half-written goes, later steps are set aside."""

        def tidy() -> None:
            directory.clean(self.root)
            for path in directory.set_aside(self.root, step):
                logger.warning("set a checkpoint of a later step aside, which this run does not use: %s", path)

        rank_zero_only(tidy)

    def save(self, engine: HybridEngine, progress: Progress) -> None:
        """Copy the state to host memory and write it in the background, or at once if the configuration says so.

        Raises:
            CheckpointError: too many checkpoints in a row could not be written; the same on every rank.
        """
        while len(self._jobs) >= HostBuffers.COUNT:
            self._settle()
        engine.optimizer.wait_parameters()
        buffer = self._writer.buffers.take()
        job = Job(
            step=progress.step,
            staging=directory.staging_folder(self.root, progress.step),
            name=self._name,
            buffer=buffer,
        )
        try:
            self._begin(job, engine, progress)
        except Exception as error:
            job.error = str(error) or type(error).__name__
        self._jobs.append(job)
        if any(everyone(job.error)):
            job.finished.set()
            self._writer.buffers.give_back(buffer)
            self.report()
            return
        self._writer.submit(job)
        if not self._settings.asynchronous:
            self.wait()

    def _begin(self, job: Job, engine: HybridEngine, progress: Progress) -> None:
        job.parts = job.buffer.copy(saved_parts(engine.optimizer, engine.module, self._grid))
        job.rng = rng_state(engine.device, engine.module.tp.rng)
        if self._grid.rank == 0:
            directory.begin(self.root, progress.step)
            dtype = str(engine.optimizer.dtype).removeprefix("torch.")
            layout = Layout(
                tensor_model_parallel_size=self._run.parallel.tensor_model_parallel_size,
                layers_per_stage=self._run.layers_per_rank,
            )
            job.manifest = make_manifest(self._model, layout, dtype, SHARDED, {})
            job.beside = lambda staging: self._write_beside(staging, progress, dtype)

    def _write_beside(self, staging: Path, progress: Progress, dtype: str) -> None:
        (staging / TRAINING_FILE).write_text(progress.to_json(), encoding="utf-8")
        write_json(staging / "config.json", self._model.to_hf(dtype))
        if self._save_tokenizer is not None:
            self._save_tokenizer(staging)

    def _unreported(self) -> dict[int, str]:
        jobs = (*self._jobs, *self._settled)
        return {job.step: job.error for job in jobs if job.error is not None and not job.reported}

    @property
    def failed(self) -> bool:
        """Whether this rank has a failure to report; not a collective call."""
        return bool(self._unreported())

    def report(self) -> None:
        """Tell every rank of failed writes and give those checkpoints up; called by all when any has `failed`.

        Raises:
            CheckpointError: too many checkpoints in a row could not be written; the same on every rank.
        """
        reports = everyone((self._unreported(), self._writer.committed))
        found: dict[int, str] = {}
        for rank, (errors, _) in enumerate(reports):
            for step, error in errors.items():
                found.setdefault(step, f"rank {rank}: {error}")
        for job in (*self._jobs, *self._settled):
            if job.step in found:
                job.give_up()
        self._settled.clear()
        self._jobs = [job for job in self._jobs if job.step not in found]
        everyone(None)  # nobody writes to the folders any more
        if self._grid.rank == 0:
            for step in found:
                shutil.rmtree(directory.staging_folder(self.root, step), ignore_errors=True)
        self._count(found, reports[0][1])

    def _count(self, found: dict[int, str], committed: int | None) -> None:
        limit = self._settings.max_failures
        self._failures = sorted({*(s for s in self._failures if committed is None or s > committed), *found})
        message = "; ".join(f"the checkpoint of step {step} could not be written: {why}" for step, why in found.items())
        if len(self._failures) >= limit:
            raise CheckpointError(
                [f"{message} ({len(self._failures)} in a row, hybrid.checkpoint.max_failures {limit})"], str(self.root)
            )
        if found and self._grid.rank == 0:
            logger.error("%s; the run goes on, those written before are untouched", message)

    def _settle(self) -> None:
        """Wait for the oldest checkpoint under way."""
        job = self._jobs[0]
        job.written.wait()
        if any(everyone(self.failed)):
            self.report()  # else rank 0 would wait in vain for the files of a rank that failed
        job.finished.wait()
        if job in self._jobs:
            self._jobs.remove(job)
            if job.error is not None:
                self._settled.append(job)

    def wait(self) -> None:
        """Wait until all that was saved is complete or reported as failed.

        Raises:
            CheckpointError: as `report`.
        """
        while self._jobs:
            self._settle()
        if any(everyone(self.failed)):
            self.report()

    def finish(self) -> None:
        """As `wait`, at the end of a run: then no later checkpoint makes up for a failure.

        Raises:
            CheckpointError: as `report`, or the last checkpoint could not be written.
        """
        self.wait()
        self._writer.close()
        newest = everyone(self._writer.committed)[0]
        lost = [step for step in self._failures if newest is None or step > newest]
        if lost:
            raise CheckpointError(
                [
                    f"the run ends without the checkpoint of step {lost[-1]}, for the reason above: mend that, and the "
                    "same command goes on from the newest complete one"
                ],
                str(self.root),
            )

    def linger(self, seconds: float) -> None:
        """Give what is being written a last chance as the run breaks off; not a collective call."""
        deadline = time.monotonic() + seconds
        for job in self._jobs:
            job.finished.wait(max(0.0, deadline - time.monotonic()))
