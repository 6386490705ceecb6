"""The arguments of fine-tuning: what `--init_from` stands for, and the flags of the data."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.chats import write_tokenizer

from hybrid.config.cli import add_arguments, add_finetune_arguments
from hybrid.config.errors import ConfigError
from hybrid.config.run import RunConfig
from hybrid.finetune.arguments import add_evaluation_arguments, evaluation_config, finetune_config

MODEL = {
    "model_type": "llama", "vocab_size": 290, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a model's configuration of 290 tokens and a tokenizer of 300."""
    assert write_tokenizer(tmp_path / "hf") == 300
    (tmp_path / "hf" / "config.json").write_text(json.dumps(MODEL))
    return tmp_path / "hf"


def config(*arguments: object) -> RunConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    add_finetune_arguments(parser)
    return finetune_config(parser.parse_args(["--ds_config", "z2", *map(str, arguments)]), 1)


def test_the_model_and_its_tokenizer_are_those_of_the_weights(model: Path) -> None:
    run = config("--init_from", model)
    assert run.model.vocab_size == 290
    assert (run.hybrid.init_from, run.hybrid.tokenizer) == (str(model), str(model))
    assert config("--init_from", model, "--model", "demo", "--tokenizer", "demo").hybrid.tokenizer == "demo"
    (model / "tokenizer.json").unlink(), (model / "tokenizer_config.json").unlink()
    assert config("--init_from", model).hybrid.tokenizer is None


def evaluation(split: str, *arguments: str) -> RunConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    add_finetune_arguments(parser)
    add_evaluation_arguments(parser)
    weights = ["--set", "hybrid.init_from=weights"]
    return evaluation_config(parser.parse_args(["--ds_config", "z2", *weights, "--split", split, *arguments]), 1)


def test_completions_that_cannot_be_made() -> None:
    with pytest.raises(ConfigError) as caught:
        evaluation("all", "--temperature", "-1", "--top_k", "-2", "--top_p", "0", "--max_new_tokens", "0")
    assert len(caught.value.violations) == 4
    assert "--temperature is -1: it must be at least 0" in caught.value.violations[0]
    with pytest.raises(ConfigError, match="--temperature is nan"):
        evaluation("all", "--temperature", "nan")
    with pytest.raises(ConfigError, match="name a model or a checkpoint with --init_from"):
        evaluation("all", "--set", "hybrid.init_from=null")


def test_a_split_that_nothing_is_held_out_for() -> None:
    with pytest.raises(ConfigError, match="--split test, but hybrid.data.test_fraction is 0"):
        evaluation("test")
    with pytest.raises(ConfigError, match="--split eval, but hybrid.data.eval_fraction is 0"):
        evaluation("eval", "--set", "hybrid.data.eval_fraction=0")
    evaluation("eval", "--set", "hybrid.data.eval_fraction=0", "--eval_data", "rows.jsonl")
    evaluation("test", "--set", "hybrid.data.test_fraction=0.1")
    evaluation("train"), evaluation("all")
    with pytest.raises(ConfigError, match="test_fraction is 0.5: it must be below 0.5, what eval_fraction leaves"):
        evaluation("all", "--set", "hybrid.data.eval_fraction=0.5", "--set", "hybrid.data.test_fraction=0.5")


def test_flags(model: Path) -> None:
    options = config(
        "--eval_data", "a", "b", "--format", "alpaca", "--no-packing", "--too_long", "drop", "--train_on", "last",
        "--chat_template", "chatml",
    ).hybrid.finetune  # fmt: skip
    assert (options.eval_data, options.format, options.packing) == (["a", "b"], "alpaca", False)
    assert (options.too_long, options.train_on, options.chat_template) == ("drop", "last", "chatml")
    assert config("--eval_data", "a").hybrid.finetune.eval_data == "a"
    assert config().hybrid.finetune.packing and not config().hybrid.finetune.resize_vocab
    with pytest.raises(ConfigError, match='hybrid.finetune.format is "alpacca"'):
        config("--format", "alpacca")
    with pytest.raises(ConfigError, match="hybrid.lora.targets"):
        config("--set", 'hybrid.lora={"targets": ["lm_head"]}')
    with pytest.raises(ConfigError, match="unknown key hybrid.lora.rank"):
        config("--set", 'hybrid.lora={"rank": 4}')


def test_a_larger_vocabulary(model: Path) -> None:
    assert config("--init_from", model, "--resize_vocab").model.vocab_size == 300
    assert (
        config("--init_from", model, "--resize_vocab", "--set", "hybrid.model.vocab_size=400").model.vocab_size == 400
    )


def test_no_framework_is_imported_on_the_way() -> None:
    code = "import sys, hybrid.finetune.arguments, hybrid.entry; "
    code += "print(sorted({'torch', 'transformers', 'deepspeed'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == "[]"


def test_the_folder_of_a_run_is_no_model(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    model.rename(run / "model")
    with pytest.raises(ConfigError, match=f"folder of a run, not of a checkpoint: name {run}/model"):
        config("--init_from", run)
