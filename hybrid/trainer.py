"""The training run: data in, steps, evaluation, metrics, the model out."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hybrid.agreement import from_rank_zero, rank_zero_first, rank_zero_only
from hybrid.build import build_engine
from hybrid.checkpoint.export import export_hf
from hybrid.config.run import Precision, RunConfig
from hybrid.data.build import DataModule, DataSpec, build_data
from hybrid.data.loader import BatchLoader, EvalLoader
from hybrid.environment import init_distributed
from hybrid.grid import Grid, build_grid
from hybrid.metrics.flops import flops_per_token, peak_flops
from hybrid.metrics.memory import peak_memory_bytes
from hybrid.metrics.meter import TrafficMeter, summarize
from hybrid.metrics.recorder import MetricsRecorder, Throughput
from hybrid.optim.state import memory_bytes

logger = logging.getLogger(__name__)

METERED_STEP = 2
"""The step whose traffic is counted: the first has start-up effects, a later one would delay the answer."""


class Trainer:
    """One run on one rank of a running world; every rank makes one with the same configuration."""

    def __init__(self, run: RunConfig, device: torch.device) -> None:
        # Rank 0's is everybody's: a path with a time in it would differ from rank to rank.
        self.run = run = from_rank_zero(run)
        self.grid: Grid = build_grid(run.parallel, run.model.num_key_value_heads)
        self.output = Path(run.hybrid.training.output_dir)
        rank_zero_only(self._make_output)
        self.data = self._open_data()
        self.engine = build_engine(run, self.grid, device)
        self.step = 0
        self._device = device
        self._traffic: dict[str, dict[str, dict[str, int]]] = {}
        self._throughput = Throughput(
            devices=self.grid.world_size,
            flops_per_token=flops_per_token(run.model, run.hybrid.data.seq_length),
            peak_flops=_peak_flops(device, run.precision),
        )
        self._recorder = MetricsRecorder(
            self.output,
            rank=self.grid.rank,
            total_steps=run.hybrid.training.train_steps,
            log_every=run.hybrid.training.log_every,
        )

    def _make_output(self) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        (self.output / "config.json").write_text(self.run.to_json())

    def _open_data(self) -> DataModule:
        """Rank 0 prepares what is not cached yet; the others then find it."""
        hybrid = self.run.hybrid
        spec = DataSpec(
            source=hybrid.data.source,
            tokenizer=hybrid.tokenizer,
            seq_length=hybrid.data.seq_length,
            vocab_size=self.run.model.vocab_size,
            seed=hybrid.training.seed,
            eval_fraction=hybrid.data.eval_fraction,
            cache_dir=hybrid.data.cache_dir,
            text_key=hybrid.data.text_key,
            reset_attention=hybrid.data.reset_attention,
        )
        return rank_zero_first(lambda: build_data(spec))

    def train(self) -> None:
        """Run to `train_steps`, evaluating and saving on the way, and write the model at the end."""
        settings = self.run.hybrid.training
        with BatchLoader(
            self.data.train,
            micro_batch_size=self.run.micro_batch_size,
            gradient_accumulation_steps=self.run.gradient_accumulation_steps,
            dp_rank=self.grid.data_rank,
            dp_size=self.run.parallel.data_parallel_size,
            samples_consumed=self.step * self.run.global_batch_size,
        ) as batches:
            while self.step < settings.train_steps:
                self._train_step(batches)
                last = self.step == settings.train_steps
                if settings.eval_every and (last or self.step % settings.eval_every == 0):
                    self.evaluate()
                if settings.save_every and not last and self.step % settings.save_every == 0:
                    self.save(self.output / f"step-{self.step}")
        self.save(self.output / "model")
        self._summarize()

    def _train_step(self, batches: BatchLoader) -> None:
        lr = self.engine.get_lr()[0]
        start = time.perf_counter()
        if self.step + 1 == METERED_STEP:
            with TrafficMeter(self.grid) as meter:
                self.engine.train_batch(batches)
            self._traffic = summarize(meter.calls)
        else:
            self.engine.train_batch(batches)
        elapsed = time.perf_counter() - start
        self.step += 1
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
                tokens=self.run.tokens_per_step,
                step_time=elapsed,
                peak_memory_bytes=peak_memory_bytes(self._device),
                skipped=result.skipped,
            )
        )

    def _summarize(self) -> None:
        """RUN/summary.json: the bytes rank 0 held and moved, as measured."""
        summary = {"memory_bytes": memory_bytes(self.engine.optimizer), "traffic_of_one_step": self._traffic}
        if self.grid.rank == 0:
            (self.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")

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
        return loss

    def save(self, directory: Path) -> None:
        """Write the model as a Hugging Face directory; a collective call."""
        self.engine.optimizer.wait_parameters()
        tokenizer = self.data.tokenizer
        export_hf(self.engine.module, self.grid, self.run.model, directory, tokenizer.save if tokenizer else None)
        if self.grid.rank == 0:
            logger.info("saved %s", directory)


def _peak_flops(device: torch.device, precision: Precision) -> float | None:
    return peak_flops(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None


def run_training(run: RunConfig) -> None:
    """Start the process group, train, and end it; what the launch scripts call."""
    # DeepSpeed tells every rank's internals at INFO; the run's own lines say what a user needs.
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    device = init_distributed()
    Trainer(run, device).train()
    dist.destroy_process_group()
