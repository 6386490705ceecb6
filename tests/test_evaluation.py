"""Which data a model is evaluated on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from support.pool import WorkerPool
from support.runs import tree, write_tokens

from hybrid.config.resolve import resolve_config
from hybrid.data.indexed import IndexedDataset
from hybrid.evaluation import Request, evaluate, reads_conversations, warn_of_length
from hybrid.trainer import no_evaluation


def tokens_of(config: dict[str, Any], splits: list[str]) -> list[int]:
    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
    run = resolve_config(config, 1)
    return [evaluate(run, Request(loss=True, split=split), torch.device("cpu"))["tokens"] for split in splits]


def test_splits_are_those_of_training(pool: WorkerPool, tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path)
    config = tree(tmp_path, tokens, (1, 1, 1, 1))
    config["hybrid"]["data"] |= {"eval_fraction": 0.1, "test_fraction": 0.25, "reset_attention": True}
    ((whole, train, evaluation, test),) = pool.run(tokens_of, 1, config, ["all", "train", "eval", "test"])
    lengths = IndexedDataset(Path(tokens)).lengths
    # The first token of a document is predicted from nothing.
    assert whole == train + evaluation + test == int(np.sum(lengths)) - len(lengths)
    assert 0 < evaluation < test < train
    config["hybrid"]["data"]["test_fraction"] = 0.0
    with pytest.raises(ValueError, match="no test set: hybrid.data.test_fraction leaves it nothing"):
        pool.run(tokens_of, 1, config, ["test"])


def completions_of(config: dict[str, Any], prompts: tuple[str, ...]) -> object:
    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
    return evaluate(resolve_config(config, 1), Request(loss=False, prompts=prompts), torch.device("cpu"))


def test_a_prompt_without_tokens_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    config = tree(tmp_path, write_tokens(tmp_path), (1, 1, 1, 1))
    config["hybrid"] |= {"tokenizer": "demo", "model": "demo", "finetune": {"chat_template": "none"}}
    with pytest.raises(ValueError, match="--prompt: text 1 is '', which has no token"):
        pool.run(completions_of, 1, config, ("", "the cat"))


def test_completions_beyond_the_models_positions(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    run = resolve_config(tree(tmp_path, "demo", (1, 1, 1, 1), model={"max_position_embeddings": 32}), 1)
    warn_of_length(run, [[5] * 3, [5] * 12], 20)
    assert not caplog.text
    warn_of_length(run, [[5] * 3, [5] * 12], 21)
    assert "a prompt of 12 tokens and --max_new_tokens 21 are more than the 32 positions" in caplog.text


def test_evaluation_that_cannot_be_is_told(tmp_path: Path) -> None:
    config = tree(tmp_path, "demo", (1, 1, 1, 1), eval_every=2)
    assert (
        "eval_every is 2, but there is no evaluation: nothing is held out, since hybrid.data.eval_fraction is 0;"
        in (no_evaluation(resolve_config(config, 1)))
    )
    config["hybrid"]["data"]["eval_fraction"] = 0.1
    assert "is 0.1, which of these data is less than one sample; raise it" in no_evaluation(resolve_config(config, 1))


def test_demo_is_text_unless_a_format_is_named(tmp_path: Path) -> None:
    config = tree(tmp_path, "demo", (1, 1, 1, 1))
    assert not reads_conversations(resolve_config(config, 1).hybrid)
    config["hybrid"]["finetune"] = {"format": "messages"}
    assert reads_conversations(resolve_config(config, 1).hybrid)
    root = Path(__file__).parents[1]
    said = {
        "pretrain": "demo (text of the standard library), or .jsonl, .txt or .parquet files",
        "finetune": "demo (short chats about sums), or files or a Hugging Face dataset of conversations",
        "evaluate": "demo is the text that pretrain.py learns; with --format messages it is the chats that finetune.py",
    }
    for script, words in said.items():
        command = [sys.executable, f"launch/{script}.py", "--help"]
        done = subprocess.run(command, cwd=root, env={"PYTHONPATH": str(root)}, text=True, capture_output=True)
        assert words in " ".join(done.stdout.split()), done.stdout + done.stderr
