"""A run that was interrupted is the uninterrupted one: weights, learning rate, samples, metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pool import WorkerPool
from support.runs import Layout, run, tree, write_tokens

MEASURED = {
    "tokens_per_second", "tokens_per_second_per_device", "tflops_per_device", "step_time", "peak_memory_bytes",
}  # fmt: skip

WARMUP = {"type": "WarmupDecayLR", "params": {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_max_lr": 0.01}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 2}}

RUNS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "one rank, fp32": ((1, 1, 1, 0), {}),
    "bf16, stage 2": ((1, 1, 2, 2), {"bf16": {"enabled": True}}),
    "fp16 with overflows": ((1, 1, 2, 1), FP16),
    "dropout, tied": ((2, 1, 2, 1), {"model": {"attention_dropout": 0.2, "tie_word_embeddings": True}}),
    "pipeline, DeepSpeed's schedule": ((1, 2, 1, 1), {"scheduler": WARMUP}),
    "Lion": ((1, 1, 2, 2), {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}),
    "SGD, not asynchronous": (
        (1, 1, 2, 1),
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "checkpoint": {"async": False}},
    ),
}


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in MEASURED} for line in lines]


@pytest.mark.parametrize("name", RUNS)
def test_three_steps_and_three_more_are_six(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    layout, changes = RUNS[name]
    tokens, ranks = write_tokens(tmp_path, documents=6), layout[0] * layout[1] * layout[2]
    common = {"train_steps": 6, "eval_fraction": 0.2, "eval_every": 2, **changes}

    def start(folder: str, **more: Any) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = pool.run(
            run, ranks, tree(tmp_path / folder, tokens, layout, **{**common, **more})
        )
        return results

    # Copies: the configuration must not depend on what was made of it.
    whole = start("whole")
    first, second = start("parts", stop_after_steps=3), start("parts")
    assert [result["step"] for result in first] == [3] * ranks
    for one, other, before in zip(whole, second, first, strict=True):
        assert one["lr"] == other["lr"] and one["loss_scale"] == other["loss_scale"]
        assert before["samples"] + other["samples"] == one["samples"]
        for key, value in one["final"].items():
            assert torch.equal(value, other["final"][key]), key
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    evaluations = [(tmp_path / folder / "evaluations.jsonl").read_text() for folder in ("parts", "whole")]
    assert evaluations[0] == evaluations[1]
    if name == "fp16 with overflows":
        assert {line["skipped"] for line in metrics(tmp_path / "whole")} == {True, False}


def test_samples_go_on_exactly_once_under_another_batch(pool: WorkerPool, tmp_path: Path) -> None:
    """From mid-epoch 0 and mid-epoch 1; the sizes of batch, microbatch and data axis change each time."""
    tokens = write_tokens(tmp_path, documents=5)
    assert (tmp_path / "tokens.bin").stat().st_size // 2 // 8 < 20  # samples in an epoch
    folder, ids = tmp_path / "run", []
    legs = [((1, 1, 2, 1), 6, 3), ((1, 1, 1, 1), 10, 2), ((1, 1, 4, 2), 8, 1), ((1, 1, 2, 0), 4, 2)]
    for layout, batch, micro in legs:
        config = tree(
            folder, tokens, layout, train_batch_size=batch, train_micro_batch_size_per_gpu=micro, stop_after_steps=2,
            train_steps=100,
        )  # fmt: skip
        results = pool.run(run, layout[2], config)
        for step in range(2):
            # A step's samples are in order over its microbatches, of each over the ranks.
            rows = [result["samples"][step] for result in results]
            for start in range(0, len(rows[0]), micro):
                ids += [row for of_rank in rows for row in of_rank[start : start + micro]]
    config = tree(
        tmp_path / "whole", tokens, (1, 1, 1, 1), train_batch_size=1, train_micro_batch_size_per_gpu=1, train_steps=56,
    )  # fmt: skip
    expected = [rows[0] for rows in pool.run(run, 1, config)[0]["samples"]]
    assert ids == expected
