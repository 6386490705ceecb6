"""Save under one layout, go on under another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pool import WorkerPool
from support.runs import Layout, assemble, run, tree, write_tokens

from hybrid.config.model import LlamaConfig
from hybrid.convert.common import Job
from hybrid.convert.hf import write_hf
from hybrid.convert.names import hf_shapes
from hybrid.convert.sources import open_checkpoint
from hybrid.convert.verify import compare_checkpoints

TIED = {"tie_word_embeddings": True}
ODD: dict[str, Any] = {
    "hidden_size": 36,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "intermediate_size": 52,
}
BIASED = {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}

MOVES: list[tuple[Layout, Layout, dict[str, Any], dict[str, Any]]] = [
    ((1, 1, 2, 1), (1, 1, 1, 1), ODD, {}),
    ((1, 1, 2, 2), (1, 1, 4, 1), ODD, {"bucket_size": 700}),
    ((1, 1, 4, 2), (2, 1, 2, 2), TIED, {}),
    ((2, 1, 2, 2), (1, 2, 2, 1), TIED, {"bucket_size": 100_000}),
    ((1, 2, 2, 1), (4, 1, 1, 0), {}, {}),
    ((4, 1, 1, 1), (1, 1, 1, 2), TIED, {}),
    ((2, 2, 1, 1), (1, 1, 4, 2), {}, {"bucket_size": 1}),
    ((1, 4, 1, 1), (2, 1, 1, 1), TIED, {}),
    ((1, 1, 4, 0), (1, 2, 2, 2), ODD, {}),
    ((2, 1, 2, 1), (2, 2, 1, 0), ODD, {}),
    ((2, 1, 1, 2), (1, 1, 3, 2), BIASED, {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 1}),
    ((1, 3, 1, 1), (2, 1, 2, 2), BIASED, {"sequence_parallel": True}),
]


def world(layout: Layout) -> int:
    return layout[0] * layout[1] * layout[2]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def uninterrupted(
    pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[list[float], list[list[tuple[int, ...]]]]]:
    """Losses and samples of a run on one rank, which every layout's run must have; each model is trained once."""
    known: dict[str, tuple[list[float], list[list[tuple[int, ...]]]]] = {}

    def get(**changes: Any) -> tuple[list[float], list[list[tuple[int, ...]]]]:
        key = repr(changes)
        if key not in known:
            folder = tmp_path_factory.mktemp("whole")
            results = pool.run(run, 1, tree(folder / "run", write_tokens(folder), (1, 1, 1, 1), **changes))
            known[key] = losses(folder / "run"), step_samples(results)
        return known[key]

    return get


@pytest.mark.parametrize("source, target, model, changes", MOVES, ids=lambda value: "".join(map(str, value))[:9])
def test_any_layout_to_any_other(
    pool: WorkerPool,
    uninterrupted: Callable[..., tuple[list[float], list[list[tuple[int, ...]]]]],
    tmp_path: Path,
    source: Layout,
    target: Layout,
    model: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    tokens = write_tokens(tmp_path)
    batch = {key: changes[key] for key in changes if key.startswith("train_")}
    saved = pool.run(
        run, world(source), tree(tmp_path / "a", tokens, source, model=dict(model), stop_after_steps=3, **batch)
    )
    config = tree(tmp_path / "a", tokens, target, model=dict(model), **changes)
    resumed = pool.run(run, world(target), config, keep_initial=True)

    shapes = hf_shapes(LlamaConfig.from_hf(config["hybrid"]["model"]))
    before = assemble([result["final"] for result in saved], shapes)
    after = assemble([result["initial"] for result in resumed], shapes)
    assert before.keys() == after.keys() and any(key.endswith("exp_avg_sq") for key in before)
    for key, value in before.items():
        assert torch.equal(value, after[key]), key
    assert {result["step"] for result in resumed} == {8}
    expected_losses, expected_samples = uninterrupted(model=dict(model), **batch)
    # fp32: another layout adds up in another order, and Adam's steps amplify that a little.
    assert losses(tmp_path / "a") == pytest.approx(expected_losses, rel=1e-5)
    assert step_samples(saved) + step_samples(resumed) == expected_samples


INTERLEAVED = {"pipeline_schedule": "interleaved"}


@pytest.mark.parametrize(
    ("source", "target", "before", "after"),
    [((1, 2, 2, 2), (2, 1, 1, 1), INTERLEAVED, {}), ((1, 2, 1, 1), (2, 2, 1, 2), {}, INTERLEAVED)],
    ids=["from-interleaved", "to-interleaved"],
)
def test_interleaved_stages_are_a_layout_like_any_other(
    pool: WorkerPool,
    uninterrupted: Callable[..., tuple[list[float], list[list[tuple[int, ...]]]]],
    tmp_path: Path,
    source: Layout,
    target: Layout,
    before: dict[str, Any],
    after: dict[str, Any],
) -> None:
    tokens, folder = write_tokens(tmp_path), tmp_path / "a"
    pool.run(run, world(source), tree(folder, tokens, source, model=dict(TIED), stop_after_steps=3, **before))
    pool.run(run, world(target), tree(folder, tokens, target, model=dict(TIED), **after))
    assert losses(folder) == pytest.approx(uninterrupted(model=dict(TIED))[0], rel=1e-5)
    checkpoint = open_checkpoint(folder / "checkpoints" / "step-00000008")
    assert compare_checkpoints(checkpoint, open_checkpoint(folder / "model")).differences == []
    assert checkpoint.manifest is not None
    assert checkpoint.manifest.layout.pipeline_model_parallel_size == target[1]


def step_samples(results: list[dict[str, Any]]) -> list[list[tuple[int, ...]]]:
    """The different samples of each step, over all ranks."""
    return [
        sorted({row for rows in step for row in rows}) for step in zip(*(r["samples"] for r in results), strict=True)
    ]


def test_every_checkpoint_is_converted_to_the_model_it_holds(pool: WorkerPool, tmp_path: Path) -> None:
    """In the model's dtype bitwise the exported model; in fp32 the masters."""
    config = tree(
        tmp_path / "run", write_tokens(tmp_path), (2, 1, 2, 2), model=dict(TIED), train_steps=2, bf16={"enabled": True}
    )
    results = pool.run(run, 4, config)
    checkpoint = open_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000002")
    assert compare_checkpoints(checkpoint, open_checkpoint(tmp_path / "run" / "model")).differences == []
    write_hf(checkpoint, Job(output=tmp_path / "fp32", dtype=torch.float32))
    exported = open_checkpoint(tmp_path / "fp32").store
    shapes = hf_shapes(checkpoint.config())
    masters = assemble([result["final"] for result in results], shapes)
    for name in shapes:
        assert torch.equal(exported.read(name), masters[f"{name}/master"])
        assert torch.equal(checkpoint.store.read(name), masters[f"{name}/weight"])
