"""Real weights learn a small task: SmolLM2-135M-Instruct answers sums in a fixed JSON form, and did not before.

Its first two layers alone, which answer nothing of sense, learn the form too.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from support.pool import WorkerPool
from support.smollm2 import cut_layers

from hybrid.config.resolve import resolve_config
from hybrid.finetune.data import chat_data
from hybrid.trainer import Trainer

pytestmark = pytest.mark.real_weights

FORM = re.compile(r'\{"a": \d+, "b": \d+, "sum": \d+\}')
QUESTIONS = ["What is 3 plus 5?", "Add 7 and 2.", "4 + 4 = ?"]
PP = {"pipeline_model_parallel_size": 2}
LORA = {"r": 16, "alpha": 32.0}
CASES = ["all weights, PP 2", "adapters, DP 2"]


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    return cut_layers(smollm2, tmp_path_factory.mktemp("two_layers") / "hf", 2)


def configuration(
    model: Path,
    folder: Path,
    layout: dict[str, Any],
    *,
    rows: int,
    seq_length: int,
    steps: int,
    rate: float,
    lora: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """`steps` steps on the demo's chats, each of two microbatches or ranks with half of its `rows`."""
    return {
        "train_batch_size": rows,
        "train_micro_batch_size_per_gpu": rows // 2,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.0}},
        "hybrid": {
            "model": str(model), "tokenizer": str(model), "init_from": str(model), "lora": lora,
            "data": {
                "source": "demo", "seq_length": seq_length, "eval_fraction": 0.0, "cache_dir": str(folder / "cache"),
            },
            "training": {
                "train_steps": steps, "output_dir": str(folder / "run"), "seed": 1,
                "lr_schedule": {"type": "cosine", "warmup_steps": 2},
            },
            **layout,
        },
    }  # fmt: skip


def train(config: dict[str, Any]) -> int:
    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
    run = resolve_config(config, dist.get_world_size())
    return Trainer(run, torch.device("cpu"), None, chat_data()).train()


@functools.cache
def answers(folder: Path) -> list[str]:
    """What transformers answers to the questions with the model of a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for question in QUESTIONS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        output = model.generate(**ids, max_new_tokens=32, do_sample=False)
        found.append(tokenizer.decode(output[0, ids["input_ids"].size(1) :], skip_special_tokens=True))
    return found


def check_that_it_learns(pool: WorkerPool, base: Path, folder: Path, config: dict[str, Any]) -> None:
    assert not any(FORM.fullmatch(answer) for answer in answers(base))
    assert pool.run(train, 2, config, timeout=1500) == [0, 0]
    losses = [json.loads(line)["loss"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] / 4
    assert all(FORM.fullmatch(answer) for answer in answers(folder / "run" / "model"))


@pytest.mark.parametrize(
    ("layout", "lora", "rows", "steps", "rate"),
    [(PP, None, 2, 16, 1e-3), ({}, LORA, 4, 24, 5e-3)],
    ids=CASES,
)
def test_two_layers_learn_to_answer_in_the_form(
    pool: WorkerPool,
    tmp_path: Path,
    two_layers: Path,
    layout: dict[str, Any],
    lora: dict[str, Any] | None,
    rows: int,
    steps: int,
    rate: float,
) -> None:
    """A chat has at most 61 tokens, so each row holds one."""
    config = configuration(two_layers, tmp_path, layout, rows=rows, seq_length=64, steps=steps, rate=rate, lora=lora)
    check_that_it_learns(pool, two_layers, tmp_path, config)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("layout", "lora", "rate"), [(PP, None, 2e-4), ({}, LORA, 2e-3)], ids=CASES)
def test_it_learns_to_answer_in_the_form(
    pool: WorkerPool, tmp_path: Path, smollm2: Path, layout: dict[str, Any], lora: dict[str, Any] | None, rate: float
) -> None:
    config = configuration(smollm2, tmp_path, layout, rows=8, seq_length=128, steps=12, rate=rate, lora=lora)
    check_that_it_learns(pool, smollm2, tmp_path, config)
