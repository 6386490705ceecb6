"""The lines a run writes and shows."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from hybrid.metrics import recorder as recording
from hybrid.metrics.memory import peak_memory_bytes
from hybrid.metrics.recorder import MetricsRecorder, StepMetrics, Throughput

KEYS = [
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "tflops_per_device",
    "mfu",
    "step_time",
    "peak_memory_bytes",
    "skipped",
]
THROUGHPUT = Throughput(devices=4, flops_per_token=2e9, peak_flops=None)


def step_metrics(step: int, throughput: Throughput = THROUGHPUT, **changes: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "loss": 5.0,
        "grad_norm": 1.5,
        "lr": 3e-3,
        "tokens": 4096,
        "step_time": 0.5,
        "peak_memory_bytes": 1 << 20,
        "skipped": False,
    }
    return throughput.metrics(step=step, **(values | changes))


def read(path: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def quiet() -> Console:
    return Console(file=io.StringIO(), soft_wrap=True)


def test_a_line_has_exactly_the_promised_keys_and_consistent_rates(tmp_path: Path) -> None:
    known = Throughput(devices=4, flops_per_token=2e9, peak_flops=16e12)
    recorder = MetricsRecorder(tmp_path / "run", rank=0, total_steps=2, console=quiet())
    recorder.record_step(step_metrics(1))
    recorder.record_step(step_metrics(2, known))
    first, second = read(tmp_path / "run" / "metrics.jsonl")
    assert list(first) == KEYS
    assert first["tokens_per_second"] == 8192 and first["tokens_per_second_per_device"] == 2048
    assert first["tflops_per_device"] == pytest.approx(2048 * 2e9 / 1e12)
    assert first["mfu"] is None and first["skipped"] is False
    assert second["mfu"] == pytest.approx(2048 * 2e9 / 16e12)


def test_values_that_are_not_finite_are_null(tmp_path: Path) -> None:
    recorder = MetricsRecorder(tmp_path, rank=0, total_steps=1, console=quiet())
    recorder.record_step(step_metrics(1, loss=math.nan, grad_norm=math.inf, skipped=True))
    recorder.record_evaluation(step=1, eval_loss=-math.inf, eval_tokens=0)
    (line,) = read(tmp_path / "metrics.jsonl")
    assert line["loss"] is None and line["grad_norm"] is None and line["skipped"] is True
    assert read(tmp_path / "evaluations.jsonl") == [{"step": 1, "eval_loss": None, "eval_tokens": 0}]


def test_a_resumed_run_cuts_what_it_repeats_and_a_torn_line(tmp_path: Path) -> None:
    recorder = MetricsRecorder(tmp_path, rank=0, total_steps=9, console=quiet())
    recorder.record_evaluation(step=0, eval_loss=9.0, eval_tokens=7)
    for step in range(1, 6):
        recorder.record_step(step_metrics(step, loss=float(step)))
    recorder.record_evaluation(step=2, eval_loss=2.0, eval_tokens=7)
    recorder.record_evaluation(step=4, eval_loss=4.0, eval_tokens=7)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "lo')
    recorder = MetricsRecorder(tmp_path, rank=0, total_steps=9, first_step=4, console=quiet())
    recorder.record_step(step_metrics(4, loss=40.0))
    assert [(line["step"], line["loss"]) for line in read(tmp_path / "metrics.jsonl")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 40.0),
    ]
    assert [line["step"] for line in read(tmp_path / "evaluations.jsonl")] == [0, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evaluations.jsonl", "metrics.jsonl"]


def test_a_fresh_run_starts_with_empty_files(tmp_path: Path) -> None:
    recorder = MetricsRecorder(tmp_path, rank=0, total_steps=9, console=quiet())
    recorder.record_evaluation(step=0, eval_loss=9.0, eval_tokens=7)
    recorder.record_step(step_metrics(1))
    MetricsRecorder(tmp_path, rank=0, total_steps=9, console=quiet())
    assert read(tmp_path / "metrics.jsonl") == read(tmp_path / "evaluations.jsonl") == []


def test_the_last_losses_are_those_of_the_run_over_its_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = MetricsRecorder(tmp_path, rank=0, total_steps=400, console=quiet())
    assert first.last_losses() == {}
    for step in range(1, 301):  # more than the end of the file that is read
        first.record_step(step_metrics(step, loss=float(step)))
    assert first.last_losses() == {"step": 300, "loss": 300.0}
    first.record_evaluation(step=300, eval_loss=2.5, eval_tokens=7)
    later = MetricsRecorder(tmp_path, rank=0, total_steps=400, first_step=301, console=quiet())
    assert later.last_losses() == {"step": 300, "loss": 300.0, "eval_step": 300, "eval_loss": 2.5}
    monkeypatch.setattr(recording, "_append_whole", lambda *a: (_ for _ in ()).throw(OSError("full")))
    later.record_step(step_metrics(301, loss=float("nan")))
    assert later.last_losses() == {"step": 301, "loss": None, "eval_step": 300, "eval_loss": 2.5}


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    recorder = MetricsRecorder(tmp_path / "run", rank=1, total_steps=1)
    recorder.record_step(step_metrics(1))
    recorder.record_evaluation(step=1, eval_loss=1.0, eval_tokens=1)
    assert not (tmp_path / "run").exists()


def test_lines_at_every_so_many_steps(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), soft_wrap=True, width=40)
    recorder = MetricsRecorder(tmp_path, rank=0, total_steps=7, log_every=3, console=console)
    for step in range(1, 8):
        recorder.record_step(step_metrics(step, skipped=step == 3))
    recorder.record_evaluation(step=7, eval_loss=6.25, eval_tokens=100)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [line.split(" | ")[0].split(" (")[0] for line in lines] == [f"step {n}/7" for n in (1, 3, 6, 7, 7)]
    assert lines[0].startswith("step 1/7 (14%, left 0:00:03) | loss 5.0000") and "8,192 tokens/s" in lines[0]
    assert "SKIPPED" in lines[1] and "SKIPPED" not in lines[2]
    assert lines[-1] == "step 7/7 | evaluation loss 6.2500 | 100 tokens"


def test_a_narrow_terminal_keeps_every_step(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60, soft_wrap=True)
    recorder = MetricsRecorder(tmp_path, rank=0, total_steps=4, console=console)
    recorder.record_step(step_metrics(1))
    recorder.record_evaluation(step=1, eval_loss=6.25, eval_tokens=100)
    recorder.record_step(step_metrics(2))
    assert isinstance(console.file, io.StringIO)
    first, evaluation, second = console.file.getvalue().splitlines()
    assert "1/4" in first and "evaluation loss 6.2500" in evaluation and "2/4 (50%, left 0:00:01)" in second


def test_peak_memory_of_the_process_grows_with_what_it_holds() -> None:
    before = peak_memory_bytes(torch.device("cpu"))
    assert before > 10 << 20
    held = torch.ones(2 * before // 4)
    assert peak_memory_bytes(torch.device("cpu")) >= before + held.nbytes // 4
