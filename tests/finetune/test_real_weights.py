"""Real weights learn a small task: SmolLM2-135M-Instruct answers sums in a fixed JSON form, and did not before."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from support.pool import WorkerPool
from support.smollm2 import write_smollm2

from hybrid.config.resolve import resolve_config
from hybrid.finetune.data import chat_data
from hybrid.trainer import Trainer

pytestmark = [pytest.mark.real_weights, pytest.mark.slow, pytest.mark.timeout(1800)]

FORM = re.compile(r'\{"a": \d+, "b": \d+, "sum": \d+\}')
QUESTIONS = ["What is 3 plus 5?", "Add 7 and 2.", "4 + 4 = ?"]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_smollm2(tmp_path_factory.mktemp("smollm2"))


def train(config: dict[str, Any]) -> int:
    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
    run = resolve_config(config, dist.get_world_size())
    return Trainer(run, torch.device("cpu"), None, chat_data()).train()


def answers(folder: Path) -> list[str]:
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


@pytest.mark.parametrize(
    ("layout", "lora", "rate"),
    [({"pipeline_model_parallel_size": 2}, None, 2e-4), ({}, {"r": 16, "alpha": 32.0}, 2e-3)],
    ids=["all weights, PP 2", "adapters, DP 2"],
)
def test_it_learns_to_answer_in_the_form(
    pool: WorkerPool, tmp_path: Path, smollm2: Path, layout: dict[str, Any], lora: dict[str, Any] | None, rate: float
) -> None:
    assert not any(FORM.fullmatch(answer) for answer in answers(smollm2))
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.0}},
        "hybrid": {
            "model": str(smollm2), "tokenizer": str(smollm2), "init_from": str(smollm2), "lora": lora,
            "data": {"source": "demo", "seq_length": 128, "eval_fraction": 0.0, "cache_dir": str(tmp_path / "cache")},
            "training": {
                "train_steps": 12, "output_dir": str(tmp_path / "run"), "seed": 1,
                "lr_schedule": {"type": "cosine", "warmup_steps": 2},
            },
            **layout,
        },
    }  # fmt: skip
    assert pool.run(train, 2, config, timeout=1500) == [0, 0]
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] / 4
    assert all(FORM.fullmatch(answer) for answer in answers(tmp_path / "run" / "model"))
