"""The report of real small runs: their engines' memory, traffic and timeline, and metrics made up beside them."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.llama import SMALL, make_batches, make_engine, my_batches, small_config

from hybrid.config.errors import ConfigError
from hybrid.config.load import load_config
from hybrid.config.training import LoraConfig
from hybrid.metrics.meter import TrafficMeter, summarize
from hybrid.metrics.observer import Observer
from hybrid.metrics.recorder import MetricsRecorder, Throughput
from hybrid.metrics.timeline import Event
from hybrid.report.data import load_run
from hybrid.report.figures import curve
from hybrid.report.page import pictures, summary_rows

ROOT = Path(__file__).parents[2]
STEPS, SEQ, MICRO_BATCHES = 120, 8, 4


def config_tree(pp: int, lora: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "train_batch_size": 2 * MICRO_BATCHES,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5000},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "hybrid": {
            "pipeline_model_parallel_size": pp,
            "model": SMALL,
            "lora": lora,
            "data": {"seq_length": SEQ},
            "training": {"train_steps": STEPS},
        },
    }


def observe(folder: Path, pp: int, lora: LoraConfig | None) -> None:
    """Train a few steps and leave behind what the trainer leaves behind."""
    config = small_config()
    engine, grid = make_engine(config, pp=pp, micro_batches=MICRO_BATCHES, seq=SEQ, lora=lora)
    observer = Observer(engine, grid, folder, profile_steps=[2], straggler_every=3)
    batches = iter(my_batches(make_batches(4 * MICRO_BATCHES, 2, SEQ, config.vocab_size), grid, MICRO_BATCHES))
    traffic = {}
    for step in (1, 2, 3):
        with observer.step(step):
            engine.train_batch(batches)
    with TrafficMeter(grid) as meter:
        engine.train_batch(batches)
        engine.optimizer.wait_parameters()
    traffic = summarize(meter.calls)
    ranks = observer.memory_by_rank(engine.optimizer)
    if grid.rank == 0:
        summary = {"memory_bytes": ranks[0]["memory_bytes"], "ranks": ranks, "traffic_of_one_step": traffic}
        (folder / "summary.json").write_text(json.dumps(summary))


def make_run(pool: Any, folder: Path, pp: int, offset: float, lora: dict[str, Any] | None = None) -> Path:
    folder.mkdir()
    (folder / "tree.json").write_text(json.dumps(config_tree(pp, lora)))
    run = load_config(str(folder / "tree.json"), world_size=pp)
    (folder / "config.json").write_text(run.to_json())
    pool.run(observe, pp, folder, pp, run.hybrid.lora)
    throughput = Throughput(devices=pp, flops_per_token=1e6, peak_flops=1e9)
    recorder = MetricsRecorder(folder, rank=0, total_steps=STEPS)
    for step in range(1, STEPS + 1):
        skipped = step == 40
        recorder.record_step(
            throughput.metrics(
                step=step, loss=2 + 3 * math.exp(-step / 30) + 0.1 * math.sin(step * 2.3) + offset,
                grad_norm=math.nan if skipped else 1 + math.cos(step) ** 2, lr=1e-3 * min(1, step / 20),
                tokens=64, step_time=0.1 + 0.01 * offset, peak_memory_bytes=10**9, skipped=skipped,
            )
        )  # fmt: skip
        if step % 40 == 0:
            recorder.record_evaluation(step=step, eval_loss=2.1 + offset, eval_tokens=64)
    return folder


@pytest.fixture(scope="module")
def runs(pool: Any, tmp_path_factory: Any) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    two, one = make_run(pool, folder / "two-stages", 2, 0.0), make_run(pool, folder / "one-stage", 1, 0.3)
    return [two, one, make_run(pool, folder / "adapters", 1, 0.1, {"r": 4})]


def test_what_was_measured_is_what_was_planned(runs: list[Path]) -> None:
    for path in runs:
        run = load_run(path)
        assert run.planned_traffic() == run.traffic
        assert [row.rank for row in run.ranks] == list(range(run.workload.p))
        for row in run.ranks:
            planned = run.planned_memory(row.stage)
            assert row.measured == {key: getattr(planned, key) for key in row.measured}
        assert run.skipped == [40] and len(run.column("grad_norm")[1]) == STEPS - 1
        assert sorted(run.timelines) == [2] and len(run.timelines[2]) == run.workload.p
        assert all((path / "profile" / f"step-2-rank-{rank}.json").is_file() for rank in range(run.workload.p))


def test_the_page(runs: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    command = [sys.executable, "launch/report.py", *map(str, runs), "--output", str(output)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = output.read_text()
    pictures = sorted(path for path in tmp_path.iterdir() if path.suffix == ".png")
    assert page.count("<img") == len(pictures) >= 11
    assert set(done.stdout.split()) == {str(output), *map(str, pictures)}
    for path in pictures:
        data = path.read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        assert data[:4] == b"\x89PNG" and width > 800 and height > 150
    words_of_all = ("two-stages", "one-stage", "skipped steps", "40", "Every collective was planned", "(p - 1) / m")
    for words in (*words_of_all, "all weights", "LoRA of rank 4 on 7 projections", "frozen measured"):
        assert words in page, words


def test_a_half_written_line_and_a_missing_summary(runs: list[Path], tmp_path: Path) -> None:
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes((runs[0] / name).read_bytes())
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 121, "lo')
    run = load_run(tmp_path)
    assert len(run.steps) == STEPS and not run.ranks and not run.traffic


def test_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the folder of a run: it has no config.json and no metrics.jsonl"):
        load_run(tmp_path)


def test_an_interleaved_run_is_shown_with_its_stages(tmp_path: Path) -> None:
    tree = config_tree(2)
    tree["hybrid"] |= {"pipeline_schedule": "interleaved"}
    (tmp_path / "tree.json").write_text(json.dumps(tree))
    (tmp_path / "config.json").write_text(load_config(str(tmp_path / "tree.json"), world_size=2).to_json())
    (tmp_path / "metrics.jsonl").write_text("")
    events = [Event(name="ForwardPass", start=0.0, end=1.0, micro_batch=0)]
    run = dataclasses.replace(load_run(tmp_path), timelines={2: {0: (0, events), 1: (1, events)}})
    (picture,) = pictures([run])
    # p = 2, v = 2, m = 4
    assert "(p - 1) / (v m) = 12.5%" in picture.note and "(stages 0, 2)" in picture.note
    labels = [label.get_text() for label in picture.figure.axes[0].get_yticklabels()]
    assert labels == ["rank 0 (stages 0, 2)", "rank 1 (stages 1, 3)"]
    assert ["layout", "TP1 PP2 x2 DP1"] in summary_rows([run])


def test_runs_that_coincide_are_told_apart_and_steps_are_whole(tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_text(json.dumps(config_tree(1)))
    (tmp_path / "config.json").write_text(load_config(str(tmp_path / "tree.json"), world_size=1).to_json())
    lines = [json.dumps({"step": step, "loss": 3.0 - step, "skipped": False}) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    run = load_run(tmp_path)
    figure = curve([run, run], "loss", "nats")
    assert figure is not None
    axes = figure.axes[0]
    assert [line.get_linestyle() for line in axes.lines] == ["-", "--"]
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert ticks == [1, 2]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("r.pdf", "the report is HTML, as"),
        ("missing/deep/r.html", "there is no folder"),
        ("r", "no folder"),
        ("/proc/r.html", "/proc cannot be written to"),
    ],
)
def test_where_a_report_cannot_go(tmp_path: Path, output: str, message: str) -> None:
    command = [sys.executable, "launch/report.py", str(tmp_path), "--output", str(tmp_path / output)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert not any(tmp_path.iterdir())
