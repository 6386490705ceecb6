"""How far a run has come, beside its tensors: counters, learning rate, loss scale, data position; as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

import hybrid
from hybrid.config.run import RunConfig
from hybrid.convert.errors import CheckpointError
from hybrid.convert.manifest import TRAINING_FILE
from hybrid.optim.engine import HybridEngine

_PACKAGES = ("torch", "deepspeed", "transformers", "safetensors", "numpy")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The content of training.json."""

    step: int
    samples_consumed: int
    """Over all ranks; where the data go on."""
    tokens_consumed: int
    """Positions of those samples."""
    global_samples: int
    """As DeepSpeed's monitors count."""
    skipped_steps: int
    skipped_in_a_row: int
    updates: int
    """Steps of the inner optimizer."""
    scheduler: dict[str, Any]
    loss_scale: dict[str, float] | None
    data_fingerprint: str
    grid: dict[str, int]
    """Where each rank's random states belong."""
    config: dict[str, Any]
    """The run's resolved configuration."""
    versions: dict[str, str]

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(asdict(self), indent=1) + "\n"


def read_progress(directory: Path) -> Progress:
    """What a checkpoint says.

    Raises:
        CheckpointError: it does not: it holds weights only, or is of another version.
    """
    path = directory / TRAINING_FILE
    if not path.is_file():
        raise CheckpointError(
            [f"it has no {TRAINING_FILE}: it holds weights only; start from them with --init_from"], str(directory)
        )
    try:
        return Progress(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise CheckpointError([f"it is not of this version of the package: {error}"], str(path)) from None


def grid_sizes(run: RunConfig) -> dict[str, int]:
    """The sizes of the process grid."""
    return {
        "tensor": run.parallel.tensor_model_parallel_size,
        "pipeline": run.parallel.pipeline_model_parallel_size,
        "data": run.parallel.data_parallel_size,
    }


def progress_of(engine: HybridEngine, run: RunConfig, samples_consumed: int, data_fingerprint: str) -> Progress:
    """How far `engine` has come, between two steps."""
    optimizer = engine.optimizer
    return Progress(
        step=engine.global_steps,
        samples_consumed=samples_consumed,
        tokens_consumed=samples_consumed * run.hybrid.data.seq_length,
        global_samples=engine.global_samples,
        skipped_steps=engine.skipped_steps,
        skipped_in_a_row=optimizer.skips,
        updates=engine.global_steps - engine.skipped_steps,
        scheduler=scheduler_state(engine.lr_scheduler),
        loss_scale=optimizer.scaler.state_dict() if optimizer.scaler is not None else None,
        data_fingerprint=data_fingerprint,
        grid=grid_sizes(run),
        config=run.to_dict(),
        versions=versions(),
    )


def restore_progress(engine: HybridEngine, progress: Progress) -> None:
    """Set the engine's counters, learning rate and loss scale; the tensors are restored elsewhere."""
    engine.global_steps = progress.step
    engine.global_samples = progress.global_samples
    engine.micro_steps = progress.step * engine.gradient_accumulation_steps()
    engine.skipped_steps = progress.skipped_steps
    engine.optimizer.skips = progress.skipped_in_a_row
    if engine.optimizer.scaler is not None and progress.loss_scale is not None:
        engine.optimizer.scaler.load_state_dict(progress.loss_scale)
    restore_scheduler(engine.lr_scheduler, progress.scheduler)


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """The position in the schedule. Rates are not stored: they follow from the configuration, which may change."""
    if isinstance(scheduler, LambdaLR):
        return {"last_epoch": scheduler.last_epoch}
    return dict(scheduler.state_dict())


def restore_scheduler(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Put a scheduler to a position, and the rate of that position into the optimizer."""
    if isinstance(scheduler, LambdaLR):
        scheduler.last_epoch = int(state.get("last_epoch", state.get("last_batch_iteration", 0)))
        scheduler._step_count = scheduler.last_epoch + 1
        rates = [
            base * factor(scheduler.last_epoch)
            for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates
        return
    position = int(state.get("last_batch_iteration", state.get("last_epoch", 0)))
    if position >= 0:  # before its first step a scheduler has the rates it was made with
        # DeepSpeed's put the rate into the optimizer as they step to a position, not as they load it.
        scheduler.step(position)


def versions() -> dict[str, str]:
    """Of the software that wrote the checkpoint."""
    return {
        "python": platform.python_version(),
        "hybrid": hybrid.__version__,
        **{name: metadata.version(name) for name in _PACKAGES},
    }
