"""Fine-tuning and evaluation from the command line, as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.chats import write_chats, write_model

ROOT = Path(__file__).parents[1]


def start(*command: object, **environment: str) -> tuple[int, str, str]:
    """Run a command the way a shell would; its exit code, output and errors."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", **environment}
    env.pop("OMP_NUM_THREADS", None)
    done = subprocess.run([str(c) for c in command], cwd=ROOT, env=env, timeout=280, text=True, capture_output=True)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, chats, and a cache for both."""
    folder = tmp_path_factory.mktemp("finetune")
    write_model(folder / "hf")
    write_chats(folder / "chat.jsonl")
    return folder


def arguments(folder: Path, *extra: object) -> list[object]:
    return [
        "--ds_config", "z2_tp2", "--init_from", folder / "hf", "--seq_length", "160",
        "--set", f"hybrid.data.cache_dir={folder / 'cache'}", *extra,
    ]  # fmt: skip


def test_from_a_model_to_an_answer(folder: Path) -> None:
    """Adapters trained at TP 2 with the literal command; the merged model evaluated at PP 2."""
    run, chats = folder / "run", folder / "chat.jsonl"
    code, output, errors = start(
        "deepspeed", "launch/finetune.py",
        *arguments(folder, "--data", chats, "--output_dir", run, "--train_steps", "6", "--eval_every", "3"),
        "--show_samples", "2", "--set", 'hybrid.lora={"r": 4}', NO_COLOR="1",
    )  # fmt: skip
    assert code == 0, output + errors
    assert output.count('[[{"a": ') >= 2 and "<|im_end|>]]" in output
    assert "format messages, template the tokenizer's own (derived from the template)" in output + errors
    assert {"model", "adapter", "best", "checkpoints"} <= {path.name for path in run.iterdir()}
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]

    code, output, errors = start(
        "python", "launch/evaluate.py", *arguments(folder, "--data", chats, "--prompt", "What is 1 plus 1?"),
        "--init_from", run / "model", "--max_new_tokens", "4", "--set", "hybrid.tensor_model_parallel_size=1",
        "--set", "hybrid.sequence_parallel=false", "--set", "hybrid.pipeline_model_parallel_size=2",
    )  # fmt: skip
    assert code == 0, output + errors
    result = json.loads(output[output.index("{\n") :])
    assert result["loss"] < losses[0] and result["tokens"] > 1000 and len(result["completions"]) == 1


def test_faults_are_told_before_and_during_the_run(folder: Path) -> None:
    code, _, errors = start("python", "launch/finetune.py", *arguments(folder, "--too_long", "cut", "--train_on", "x"))
    assert code == 2 and "hybrid.finetune.too_long" in errors and "hybrid.finetune.train_on" in errors
    assert "Traceback" not in errors
    code, _, errors = start("python", "launch/finetune.py", *arguments(folder, "--init_from", folder / "nowhere"))
    assert code == 2 and "there is no such folder" in errors and "Traceback" not in errors
    bad = folder / "bad.jsonl"
    bad.write_text('{"messages": [{"role": "boss", "content": "x"}]}\n')
    code, output, errors = start(
        "python", "launch/finetune.py", *arguments(folder, "--data", bad, "--output_dir", folder / "bad")
    )
    assert code != 0 and "bad.jsonl:1: message 1 has the role 'boss'" in output + errors


def test_dry_run_knows_the_models_size(folder: Path) -> None:
    code, output, errors = start("python", "launch/finetune.py", *arguments(folder, "--dry_run", "--resize_vocab"))
    assert code == 0, errors
    assert "vocab" in output.lower() and "300" in output
