"""`--set PATH=JSON`: what it sets, and the paths it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid.config.deepspeed import known_paths
from hybrid.config.errors import ConfigError
from hybrid.config.overrides import FLAGS, apply_override
from hybrid.config.training import DataConfig, hybrid_paths


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("hybrid.tensor_model_parallel_size=2", {"hybrid": {"tensor_model_parallel_size": 2}}),
        ("bf16.enabled=false", {"bf16": {"enabled": False}}),
        ("hybrid.model=llama2-7b", {"hybrid": {"model": "llama2-7b"}}),
        ('hybrid.model="llama2-7b"', {"hybrid": {"model": "llama2-7b"}}),
        ("hybrid.data.source=a=b.txt", {"hybrid": {"data": {"source": "a=b.txt"}}}),
        ("hybrid.pipeline_split=[3, 1]", {"hybrid": {"pipeline_split": [3, 1]}}),
        ("hybrid.training.stop_after_steps=null", {"hybrid": {"training": {"stop_after_steps": None}}}),
        ("optimizer.params.lr=1e-3", {"optimizer": {"params": {"lr": 1e-3}}}),
        ('hybrid={"tokenizer": "t"}', {"hybrid": {"tokenizer": "t"}}),
        ("zero_optimization.offload_param.device=cpu", {"zero_optimization": {"offload_param": {"device": "cpu"}}}),
    ],
)
def test_values_are_json_or_else_strings(override: str, expected: dict[str, Any]) -> None:
    assert apply_override({}, override) == expected


def test_neighbours_stay_and_the_given_tree_is_left_alone() -> None:
    tree = {"bf16": {"enabled": True}, "hybrid": {"data": {"seq_length": 8, "source": "demo"}}}
    changed = apply_override(tree, "hybrid.data.seq_length=16")
    assert changed == {"bf16": {"enabled": True}, "hybrid": {"data": {"seq_length": 16, "source": "demo"}}}
    assert tree["hybrid"] == {"data": {"seq_length": 8, "source": "demo"}}


def test_a_preset_can_be_changed_in_part() -> None:
    tree = apply_override({"hybrid": {"model": "llama3.2-1b"}}, "hybrid.model.num_hidden_layers=2")
    tree = apply_override(tree, "hybrid.model.rope_scaling.factor=8")
    inline = tree["hybrid"]["model"]
    assert (inline["num_hidden_layers"], inline["hidden_size"], inline["rope_scaling"]["factor"]) == (2, 2048, 8)
    assert apply_override({}, "hybrid.model.vocab_size=9")["hybrid"]["model"]["hidden_size"] == 256


def test_a_short_form_can_be_extended() -> None:
    tree = apply_override({"hybrid": {"recompute": "full"}}, "hybrid.recompute.num_layers=2")
    assert tree == {"hybrid": {"recompute": {"granularity": "full", "num_layers": 2}}}


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("hybrid.tensor_parallel_size=2", "hybrid.tensor_model_parallel_size"),
        ("hybrid.train_steps=2", "hybrid.training.train_steps"),
        ("train_steps=2", "hybrid.training.train_steps"),
        ("hybrid.model.num_layers=2", "hybrid.model.num_hidden_layers"),
        ("bf16.enable=true", "bf16.enabled"),
        ("zero_optimization.stages=1", "zero_optimization.stage"),
    ],
)
def test_unknown_paths_name_the_nearest(override: str, suggestion: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_override({}, override)
    assert f"did you mean {suggestion}?" in str(caught.value)


def test_a_path_like_nothing_lists_its_neighbours() -> None:
    keys = ", ".join(sorted(DataConfig.model_fields))
    with pytest.raises(ConfigError, match=f"the keys here are {keys}"):
        apply_override({}, "hybrid.data.xyzzy=1")


@pytest.mark.parametrize("override", ["bf16.enabled", "=3", ""])
def test_the_form_is_explained(override: str) -> None:
    with pytest.raises(ConfigError, match="PATH=JSON"):
        apply_override({}, override)


def test_a_value_is_not_taken_for_a_section() -> None:
    with pytest.raises(ConfigError, match="bf16 is true: it must be an object"):
        apply_override({"bf16": True}, "bf16.enabled=true")


def test_every_flag_has_a_path_of_the_file() -> None:
    assert set(FLAGS.values()) <= hybrid_paths()
    assert not {path for path in known_paths() if path.startswith("hybrid.")}
