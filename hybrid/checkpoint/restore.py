"""Brings a checkpoint of any layout back into an engine."""

from __future__ import annotations

import logging
from pathlib import Path

from hybrid.agreement import together
from hybrid.checkpoint.directory import FOLDER
from hybrid.checkpoint.parts import check_states, load_parts
from hybrid.checkpoint.progress import Progress, grid_sizes, read_progress, restore_progress
from hybrid.checkpoint.rng import reseed, restore_rng_state, rng_file
from hybrid.checkpoint.select import choose
from hybrid.config.run import RunConfig
from hybrid.convert.names import hf_shapes
from hybrid.convert.sources import open_checkpoint
from hybrid.grid import Grid
from hybrid.optim.engine import HybridEngine
from hybrid.tensor_parallel.lora import model_adapter_shapes

logger = logging.getLogger(__name__)


def find_checkpoint(run: RunConfig) -> tuple[Path, Progress] | None:
    """What the run goes on from, verified, or None for a fresh start; a collective call.

    Raises:
        CheckpointError: there is nothing sound and a fresh start was not asked for; RemoteError on the other ranks.
    """
    training = run.hybrid.training
    path = together(lambda: choose(training.resume, Path(training.output_dir) / FOLDER))
    return None if path is None else (path, together(lambda: read_progress(path)))


def restore(engine: HybridEngine, run: RunConfig, grid: Grid, path: Path, progress: Progress) -> None:
    """Fill weights, states, counters and random streams; a collective call.

    Raises:
        CheckpointError: the checkpoint does not hold the whole model; RemoteError where another rank found that.
    """

    def read() -> None:
        store = open_checkpoint(path).store
        weights, lora = hf_shapes(run.model), run.hybrid.lora
        if lora is None:
            check_states(store, weights)
        else:
            check_states(store, model_adapter_shapes(weights, lora.r, lora.targets), frozen=weights)
        load_parts(engine.optimizer, engine.module, store, progress.updates)

    engine.optimizer.wait_parameters()
    together(read)
    engine.optimizer.write_back()
    engine.optimizer.wait_parameters()
    engine.optimizer.keep_masters()
    restore_progress(engine, progress)
    _restore_streams(engine, run, grid, path, progress)


def _restore_streams(engine: HybridEngine, run: RunConfig, grid: Grid, path: Path, progress: Progress) -> None:
    tracker = engine.module.tp.rng
    if progress.grid == grid_sizes(run):
        restore_rng_state((path / rng_file(grid.rank)).read_text(encoding="utf-8"), engine.device, tracker)
    elif tracker is not None:
        tracker.load_state(reseed(run.hybrid.training.seed, progress.step, grid.rank, engine.device).state())
        if grid.rank == 0:
            logger.info("another layout than the checkpoint's: dropout goes on with new random streams")
