"""The training run: data in, steps, evaluation, metrics, the model out."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from hybrid.agreement import from_rank_zero, rank_zero_first, rank_zero_only, together
from hybrid.build import build_engine
from hybrid.checkpoint.checkpointer import Checkpointer
from hybrid.checkpoint.compatible import check_compatible
from hybrid.checkpoint.final import BestModel, export_trained, stopping
from hybrid.checkpoint.progress import progress_of
from hybrid.checkpoint.restore import find_checkpoint, restore
from hybrid.config.cautions import long_warmup
from hybrid.config.run import Precision, RunConfig
from hybrid.data.build import DataModule, build_data
from hybrid.data.loader import BatchLoader, EvalLoader
from hybrid.data.spec import text_spec
from hybrid.grid import Grid, build_grid
from hybrid.limits import Limits
from hybrid.metrics.flops import flops_per_token, peak_flops
from hybrid.metrics.memory import peak_memory_bytes
from hybrid.metrics.meter import TrafficMeter, summarize
from hybrid.metrics.observer import Observer
from hybrid.metrics.recorder import MetricsRecorder, Throughput
from hybrid.optim.state import memory_bytes
from hybrid.planner.banner import banner
from hybrid.run_folder import unwritable
from hybrid.signals import StopSignals

logger = logging.getLogger(__name__)

METERED_STEP = 1
"""Steps before the one whose traffic is counted: the first has start-up effects, more would delay the answer."""

OpenData = Callable[[RunConfig], DataModule]


def open_text_data(run: RunConfig) -> DataModule:
    """The pretraining data that the configuration names."""
    return build_data(text_spec(run))


class Trainer:
    """One run on one rank of a running world; every rank makes one with the same configuration.

    Args:
        signals: tells whether this launch was asked to end.
        open_data: opens the data; called on rank 0 first, which prepares what is not cached yet.
        keep_best: write the model of the lowest evaluation loss as well.
    """

    def __init__(
        self,
        run: RunConfig,
        device: torch.device,
        signals: StopSignals | None = None,
        open_data: OpenData = open_text_data,
        *,
        keep_best: bool = False,
    ) -> None:
        self._limits = Limits(run.hybrid.training, signals)
        # Rank 0's is everybody's: a path with a time in it would differ from rank to rank.
        self.run = run = from_rank_zero(run)
        self.grid: Grid = build_grid(run.parallel, run.model.num_key_value_heads)
        self.output = Path(run.hybrid.training.output_dir)
        found = find_checkpoint(run)
        self.data = rank_zero_first(lambda: open_data(run))
        if found is not None:
            path, progress = found
            together(lambda: check_compatible(progress, run, self.data.fingerprint, str(path)))
        rank_zero_only(self._make_output)
        self.engine = build_engine(_without_init(run) if found else run, self.grid, device)
        tokenizer = self.data.tokenizer
        exported = stopping(run.model, self.data.end_ids)
        self.checkpointer = Checkpointer(run, self.grid, tokenizer.save if tokenizer else None, exported)
        # Counted here: a stage without a loader has to agree on the size of the next step too.
        self._samples_consumed = 0
        if found is not None:
            restore(self.engine, run, self.grid, *found)
            self._samples_consumed = found[1].samples_consumed
            if self.grid.rank == 0:
                logger.info("going on from %s", found[0])
        self.checkpointer.start_after(self.step)
        self._first_step = self.step + 1
        self._device = device
        self._traffic: dict[str, dict[str, dict[str, int]]] = {}
        self._throughput = Throughput(
            devices=self.grid.world_size,
            flops_per_token=flops_per_token(run.model, run.hybrid.data.seq_length, frozen=run.hybrid.lora is not None),
            peak_flops=_peak_flops(device, run.precision),
        )
        self._observer = Observer(
            self.engine,
            self.grid,
            self.output,
            profile_steps=run.hybrid.profile.steps,
            straggler_every=run.hybrid.profile.straggler_every,
        )
        self._best = BestModel(self.output) if keep_best else None
        self._recorder = MetricsRecorder(
            self.output,
            rank=self.grid.rank,
            total_steps=run.hybrid.training.train_steps,
            first_step=self._first_step,
            log_every=run.hybrid.training.log_every,
        )

    @property
    def step(self) -> int:
        """Steps of the run so far, those before a resume included."""
        return int(self.engine.global_steps)

    def _make_output(self) -> None:
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            (self.output / "config.json").write_text(self.run.to_json())
        except OSError as error:
            raise unwritable(self.output, error) from None

    def train(self) -> int:
        """Run to `train_steps` or to the end of this launch, evaluating and saving on the way.

        Returns:
            The exit code: 0, or EXIT_STOPPED where the launch was asked to end before the run was complete.

        Raises:
            CheckpointError: checkpoints could not be written.
        """
        settings = self.run.hybrid.training
        if self.grid.rank == 0:
            logger.info("%s", "\n".join(banner(self.run, self.step)))
            if settings.eval_every and self.data.eval is None:
                logger.warning("%s", no_evaluation(self.run))
            if caution := long_warmup(self.run):
                logger.warning("%s", caution)
        with self._batches() as batches:
            ends = self.step >= settings.train_steps
            if ends and self.grid.rank == 0:
                logger.info("the run is complete: to go on, raise train_steps above %d", self.step)
            while not ends:
                self._train_step(batches)
                complete = self.step == settings.train_steps
                ends = complete or self._limits.reached
                if settings.eval_every and (complete or self.step % settings.eval_every == 0):
                    self.evaluate()
                if ends or (settings.save_every and self.step % settings.save_every == 0):
                    self.save()
        complete = self.step >= settings.train_steps
        if complete:
            self.export()
        self._summarize()
        self.checkpointer.finish()
        if self.grid.rank == 0 and not complete:
            logger.info("%s: the run is saved at step %d of %d", self._limits.reason, self.step, settings.train_steps)
        return 0 if complete else self._limits.exit_code

    def _batches(self) -> AbstractContextManager[BatchLoader | None]:
        """This rank's microbatches; a stage in the middle of the pipeline needs neither tokens nor labels."""
        if not (self.grid.is_first_stage or self.grid.is_last_stage):
            return nullcontext()
        return BatchLoader(
            self.data.train,
            micro_batch_size=self.run.micro_batch_size,
            gradient_accumulation_steps=self.run.gradient_accumulation_steps,
            dp_rank=self.grid.data_rank,
            dp_size=self.run.parallel.data_parallel_size,
            samples_consumed=self._samples_consumed,
        )

    def save(self) -> None:
        """Write a checkpoint from which the run can go on; a collective call."""
        progress = progress_of(self.engine, self.run, self._samples_consumed, self.data.fingerprint)
        self.checkpointer.save(self.engine, progress)

    def export(self) -> None:
        """Write the model as a Hugging Face directory, unless an earlier launch has; a collective call."""
        directory = self.output / "model"
        if from_rank_zero(self.step < self._first_step and directory.exists()):
            return
        export_trained(self.engine, self.grid, self.run, self.data, directory)

    def _train_step(self, batches: BatchLoader | None) -> None:
        lr = self.engine.get_lr()[0]
        samples = self.run.batch_size_at(self._samples_consumed)
        self.engine.set_train_batch_size(samples)
        start = time.perf_counter()
        self.engine.optimizer.raise_flags((self._limits.asked, self.checkpointer.failed))
        with self._observer.step(self.step + 1):
            if self.step + 1 == self._first_step + METERED_STEP:
                with TrafficMeter(self.grid) as meter:
                    self.engine.train_batch(batches)
                self._traffic = summarize(meter.calls)
            else:
                self.engine.train_batch(batches)
        elapsed = time.perf_counter() - start
        self._samples_consumed += samples
        assert batches is None or batches.samples_consumed == self._samples_consumed, "the engine takes whole steps"
        result = self.engine.optimizer.result
        assert result is not None
        if result.skipped and self.grid.rank == 0:
            logger.warning("step %d was skipped: %s", self.step, result.reason)
        self._recorder.record_step(
            self._throughput.metrics(
                step=self.step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=lr,
                tokens=samples * self.run.hybrid.data.seq_length,
                step_time=elapsed,
                peak_memory_bytes=peak_memory_bytes(self._device),
                skipped=result.skipped,
            )
        )
        stop, save_failed = result.flags
        self._limits.count_step(asked=stop)
        if save_failed:
            self.checkpointer.report()

    def _summarize(self) -> None:
        """RUN/summary.json: the last losses, the bytes each rank holds, and those rank 0 moves in a step, as
        measured."""
        ranks = self._observer.memory_by_rank(self.engine.optimizer)
        if self.grid.rank != 0:
            return
        held = memory_bytes(self.engine.optimizer)
        losses = self._recorder.last_losses()
        summary = {**losses, "memory_bytes": held, "traffic_of_one_step": self._traffic, "ranks": ranks}
        (self.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        logger.info("rank 0 holds %s", ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in held.items()))
        for axis, ops in self._traffic.items():
            moved = ", ".join(f"{op} {entry['payload_bytes'] / 2**20:,.2f} MiB" for op, entry in ops.items())
            logger.info("and moves on the %s axis in a step: %s", axis, moved)

    def evaluate(self) -> float | None:
        """Loss per token of the held-out data, or None without any; a collective call."""
        if self.data.eval is None:
            return None
        loader = EvalLoader(
            self.data.eval,
            micro_batch_size=self.run.micro_batch_size,
            dp_rank=self.grid.data_rank,
            dp_size=self.run.parallel.data_parallel_size,
            max_samples=self.run.hybrid.training.eval_batches * self.run.global_batch_size,
        )
        loss, tokens = self.engine.evaluate(iter(loader), len(loader))
        self._recorder.record_evaluation(step=self.step, eval_loss=loss, eval_tokens=tokens)
        if self.engine.monitor.enabled and self.grid.rank == 0:
            self.engine.monitor.write_events([("Train/Samples/eval_loss", loss, self.engine.global_samples)])
        if self._best is not None and self._best.improves(loss):
            export_trained(self.engine, self.grid, self.run, self.data, self._best.directory, best=True)
            self._best.record(self.step, loss)
        return loss


def no_evaluation(run: RunConfig) -> str:
    """Why a run that asks for evaluations has none, and what to do about it."""
    fraction = run.hybrid.data.eval_fraction
    why = f"{fraction:g}, which of these data is less than one sample" if fraction else "0"
    return (
        f"hybrid.training.eval_every is {run.hybrid.training.eval_every}, but there is no evaluation: nothing is held "
        f"out, since hybrid.data.eval_fraction is {why}; raise it, fine-tune with --eval_data, or set --eval_every 0"
    )


def _peak_flops(device: torch.device, precision: Precision) -> float | None:
    return peak_flops(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None


def _without_init(run: RunConfig) -> RunConfig:
    return replace(run, hybrid=run.hybrid.model_copy(update={"init_from": None}))
