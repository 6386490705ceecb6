"""What a run reports: one line per step in metrics.jsonl, evaluations.jsonl, and the console."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from rich.console import Console

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"

_RECENT_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One line of metrics.jsonl; a value that is not finite is written as null, since JSON has no NaN."""

    step: int
    """Counts from 1."""
    loss: float
    """Mean over the supervised tokens of the global batch, in nats."""
    grad_norm: float
    """Before clipping."""
    lr: float
    """Used by this step."""
    tokens: int
    """Tokens of this step's global batch."""
    tokens_per_second: float
    tokens_per_second_per_device: float
    tflops_per_device: float
    """Model FLOPs (see flops.py), 1e12 per second."""
    mfu: float | None
    """Model FLOPs utilisation, 0 to 1; None where the device's peak is unknown."""
    step_time: float
    """Seconds."""
    peak_memory_bytes: int
    """Most memory a device has held so far (the process, on the CPU)."""
    skipped: bool
    """The weights were not updated, because the gradients were not finite."""


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """What turns tokens and seconds into the rates of a step."""

    devices: int
    flops_per_token: float
    peak_flops: float | None
    """Of one device; None where unknown."""

    def metrics(
        self,
        *,
        step: int,
        loss: float,
        grad_norm: float,
        lr: float,
        tokens: int,
        step_time: float,
        peak_memory_bytes: int,
        skipped: bool,
    ) -> StepMetrics:
        """The line of a step; the same on every rank that is given the same values."""
        rate = tokens / step_time if step_time > 0 else math.nan
        flops = rate * self.flops_per_token / self.devices
        return StepMetrics(
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=tokens,
            tokens_per_second=rate,
            tokens_per_second_per_device=rate / self.devices,
            tflops_per_device=flops / 1e12,
            mfu=None if self.peak_flops is None else flops / self.peak_flops,
            step_time=step_time,
            peak_memory_bytes=peak_memory_bytes,
            skipped=skipped,
        )


class MetricsRecorder:
    """Writes and shows a run's metrics on rank 0; on the other ranks it does nothing."""

    def __init__(
        self,
        run_dir: Path,
        *,
        rank: int,
        total_steps: int,
        first_step: int = 1,
        log_every: int = 1,
        console: Console | None = None,
    ) -> None:
        """Open the files; what they hold of steps from `first_step` on (a run that was resumed) is cut away.

        Args:
            first_step: the next step of the run; 1 for a fresh run, whose files start empty.
            log_every: steps between the console's lines.
        """
        self._active = rank == 0
        if not self._active:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        self._paths = {name: run_dir / name for name in (METRICS_FILE, EVALUATIONS_FILE)}
        for path in self._paths.values():
            cut_lines(path, first_step)
        self._total = total_steps
        self._first = first_step
        self._log_every = log_every
        self._times: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._console = console or Console(soft_wrap=True)
        self._unwritten: dict[str, bytes] = {}
        self._complained = self._mute = False

    def record_step(self, metrics: StepMetrics) -> None:
        """Append a step's line and show it."""
        if not self._active:
            return
        self._append(METRICS_FILE, asdict(metrics))
        self._times.append(metrics.step_time)
        left = timedelta(seconds=round(sum(self._times) / len(self._times) * (self._total - metrics.step)))
        if metrics.step in (self._first, self._total) or metrics.step % self._log_every == 0:
            done = f"{metrics.step / self._total:.0%}"
            self._show(f"step {metrics.step}/{self._total} ({done}, left {left}) | {describe(metrics)}")

    def record_evaluation(self, *, step: int, eval_loss: float, eval_tokens: int) -> None:
        """Append an evaluation after `step` and show it."""
        if not self._active:
            return
        self._append(EVALUATIONS_FILE, {"step": step, "eval_loss": eval_loss, "eval_tokens": eval_tokens})
        self._show(f"step {step}/{self._total} | evaluation loss {eval_loss:.4f} | {eval_tokens} tokens")

    def last_losses(self) -> dict[str, object]:
        """`step` and `loss` of the run's last step, `eval_step` and `eval_loss` of its last evaluation, as far as
        there are any; also those of earlier launches. Rank 0 asks."""
        found: dict[str, object] = {}
        for name, keys in (
            (METRICS_FILE, {"step": "step", "loss": "loss"}),
            (EVALUATIONS_FILE, {"step": "eval_step", "eval_loss": "eval_loss"}),
        ):
            lines = (_tail(self._paths[name]) + self._unwritten.get(name, b"")).splitlines()
            if lines:
                last = json.loads(lines[-1])
                found |= {shown: last[key] for key, shown in keys.items()}
        return found

    def _append(self, name: str, values: Mapping[str, object]) -> None:
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        unwritten = self._unwritten.pop(name, b"") + (json.dumps(finite, allow_nan=False) + "\n").encode()
        try:
            _append_whole(self._paths[name], unwritten)
        except OSError as error:
            if not self._complained:
                logger.warning("%s cannot be written (%s): its lines are kept and written later", name, error)
            self._complained = True
            self._unwritten[name] = unwritten

    def _show(self, line: str) -> None:
        try:
            self._console.print(line, markup=False, highlight=False)
        except OSError as error:  # no reason to end a run
            if not self._mute:
                logger.warning("standard output cannot be written (%s): the run goes on without it", error.strerror)
            self._mute = True


def _append_whole(path: Path, lines: bytes) -> None:
    """Append all or, where the disk is full, nothing: whoever reads along never finds half a line in the middle."""
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        written = 0
        try:
            while written < len(lines):
                written += file.write(lines[written:])
        except OSError:
            file.truncate(size)
            raise


def _tail(path: Path, size: int = 1 << 16) -> bytes:
    """The end of a file, with the last line whole."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read()


def describe(metrics: StepMetrics) -> str:
    """A step in one line for people."""
    parts = [
        f"loss {metrics.loss:.4f}",
        f"grad norm {metrics.grad_norm:.3f}",
        f"lr {metrics.lr:.2e}",
        f"{metrics.tokens_per_second:,.0f} tokens/s",
        f"{metrics.tflops_per_device:.3g} TFLOP/s per device",
    ]
    if metrics.mfu is not None:
        parts.append(f"MFU {metrics.mfu:.1%}")
    parts.append(f"{metrics.step_time:.2f} s")
    if metrics.skipped:
        parts.append("SKIPPED")
    return " | ".join(parts)


def cut_lines(path: Path, first_step: int) -> None:
    """Keep the whole lines of steps before `first_step`; none of them where that is the run's first."""
    if not path.exists():
        path.touch()
        return
    kept = []
    if first_step > 1:
        for line in path.read_bytes().splitlines(keepends=True):
            step = _step_of(line)
            if step is not None and step < first_step:
                kept.append(line)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(b"".join(kept))
    os.replace(temporary, path)


def _step_of(line: bytes) -> int | None:
    """The step of a line; None for one that was cut short by a kill."""
    if not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return value if isinstance(value, int) else None
