"""The architecture against transformers: sizes, both styles of config.json, and what is refused."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hybrid.config.errors import ConfigError
from hybrid.config.model import LlamaConfig, load_model_config, num_parameters, preset_names, read_model_json
from hybrid.config.rope import RopeConfig

SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ROPES = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 16.0, "truncate": False},
    LLAMA3,
]

PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "demo": 3_950_848,
}


def read_by_transformers(raw: dict[str, Any]) -> transformers.LlamaConfig:
    config = transformers.LlamaConfig.from_dict(copy.deepcopy(raw))
    assert isinstance(config, transformers.LlamaConfig)
    return config


def counted_by_transformers(config: LlamaConfig) -> int:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(read_by_transformers(config.to_hf("bf16")))
    return sum(parameter.numel() for parameter in model.parameters())


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        LlamaConfig.from_hf({**SMALL, **changes})
    return str(caught.value)


def test_presets_have_the_published_sizes() -> None:
    assert {name: num_parameters(load_model_config(name)) for name in preset_names()} == PUBLISHED


@pytest.mark.parametrize("name", ["demo", "llama3-8b", "llama3.2-1b"])
def test_presets_have_as_many_parameters_as_in_transformers(name: str) -> None:
    config = load_model_config(name)
    assert num_parameters(config) == counted_by_transformers(config)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"head_dim": 24, "num_key_value_heads": 1},
        {"num_key_value_heads": None, "attention_bias": True, "mlp_bias": True},
    ],
)
def test_num_parameters_counts_what_transformers_makes(changes: dict[str, Any]) -> None:
    config = LlamaConfig.from_hf({**SMALL, **changes})
    assert num_parameters(config) == counted_by_transformers(config)


def test_defaults_are_those_of_transformers() -> None:
    ours, theirs = LlamaConfig.from_hf(SMALL), transformers.LlamaConfig(**SMALL)
    for name in LlamaConfig.model_fields.keys() - {"rope"}:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert theirs.rope_parameters == {"rope_type": ours.rope.rope_type, "rope_theta": ours.rope.rope_theta}


@pytest.mark.parametrize("name", preset_names())
def test_a_written_config_reads_back_equal(name: str) -> None:
    config = load_model_config(name)
    assert LlamaConfig.from_hf(config.to_hf("bf16")) == config


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: str(rope["rope_type"]))
def test_both_styles_read_alike_and_are_both_written(rope: dict[str, Any]) -> None:
    new = {**SMALL, "rope_parameters": {**rope, "rope_theta": 500000.0}}
    old = {**SMALL, "rope_theta": 500000.0, "rope_scaling": None if rope["rope_type"] == "default" else rope}
    config = LlamaConfig.from_hf(new)
    assert LlamaConfig.from_hf(old) == config
    written = config.to_hf("bf16")
    assert written["rope_parameters"] == {**rope, "rope_theta": 500000.0}
    assert (written["rope_theta"], written["rope_scaling"]) == (500000.0, old["rope_scaling"])
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
    for style in (("rope_theta", "rope_scaling", "torch_dtype"), ("rope_parameters", "dtype")):
        part = {key: value for key, value in written.items() if key not in style}
        read = read_by_transformers(part)
        assert read.rope_parameters == {**rope, "rope_theta": 500000.0}
        assert read.dtype == torch.bfloat16
    assert read_by_transformers(written).rope_parameters == {**rope, "rope_theta": 500000.0}


def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    theirs = transformers.LlamaConfig(**SMALL, rope_parameters={**LLAMA3, "rope_theta": 5e5}, rms_norm_eps=1e-2)
    theirs.save_pretrained(tmp_path)
    config = load_model_config(str(tmp_path))
    assert config.rope == RopeConfig(**LLAMA3, rope_theta=5e5)
    assert config.rms_norm_eps == 1e-2
    assert config.to_hf("fp32")["rms_norm_eps"] == 1e-2
    assert load_model_config(str(tmp_path / "config.json")) == config


def test_the_old_key_type_is_read_and_its_absence_is_not_default() -> None:
    scaling = {"type": "linear", "factor": 2.0}
    assert LlamaConfig.from_hf({**SMALL, "rope_scaling": scaling}).rope == RopeConfig(rope_type="linear", factor=2.0)
    both = {"type": "default", **LLAMA3}
    assert 'type is "default" but rope_scaling.rope_type is "llama3"' in refusal(rope_scaling=both)


def test_styles_that_disagree_are_an_error_with_both_values() -> None:
    message = refusal(rope_theta=10000.0, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    assert "10000.0" in message and "500000.0" in message
    message = refusal(rope_scaling={**LLAMA3, "factor": 32.0}, rope_parameters=LLAMA3)
    assert "factor 32.0" in message and "8.0" in message
    message = refusal(rope_scaling=None, rope_parameters=LLAMA3)
    assert '"default"' in message and '"llama3"' in message


def test_original_length_defaults_to_the_models() -> None:
    scaling = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    config = LlamaConfig.from_hf({**SMALL, "max_position_embeddings": 64, "rope_scaling": scaling})
    assert config.rope.original_max_position_embeddings == 64


def test_the_given_dict_is_left_alone() -> None:
    raw = {**SMALL, "rope_scaling": {**LLAMA3, "type": "llama3"}}
    before = copy.deepcopy(raw)
    LlamaConfig.from_hf(raw)
    assert raw == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, ['hidden_act "gelu"', "silu"]),
        ({"pretraining_tp": 2}, ["pretraining_tp 2", "set it to 1"]),
        ({"model_type": "qwen2"}, ['model_type "qwen2"', "llama", "mistral"]),
        ({"model_type": "mistral", "sliding_window": 512}, ["sliding_window 512", "max_position_embeddings 131072"]),
        ({"model_type": "mistral"}, ["sliding_window 4096"]),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ['"longrope"', "yarn"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["linear needs factor"]),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, ["high_freq_factor 1.0", "low_freq_factor 1.0"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, ["rope.factor = 0.5", "greater than or equal to 1"]),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor 0.5"]),
        ({"rope_scaling": "linear"}, ['rope_scaling is "linear"', "object or null"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config", '"bits": 4']),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3", "1, 2, 4"]),
        ({"hidden_size": 66}, ["hidden_size 66", "num_attention_heads 4", "head_dim"]),
        ({"head_dim": 15}, ["head_dim 15 is odd"]),
        ({"vocab_size": None}, ["vocab_size"]),
        ({"hidden_size": "64"}, ['hidden_size = "64"']),
        ({"num_hidden_layers": 0}, ["num_hidden_layers = 0", "greater than 0"]),
        ({"attention_dropout": 1.5}, ["attention_dropout = 1.5"]),
    ],
)
def test_refused_with_the_value(changes: dict[str, Any], words: list[str]) -> None:
    message = refusal(**changes)
    for word in words:
        assert word in message


def test_all_reasons_are_listed_at_once() -> None:
    message = refusal(hidden_act="relu", pretraining_tp=4, num_key_value_heads=3, rope_scaling={"type": "su"})
    assert message.startswith("4 problems")


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ConfigError, match="intermediate_size is missing"):
        LlamaConfig.from_hf({key: value for key, value in SMALL.items() if key != "intermediate_size"})


def test_explicit_head_dim_need_not_divide_the_hidden_size() -> None:
    assert LlamaConfig(**{**SMALL, "hidden_size": 66, "head_dim": 24}).head_dim == 24


def test_null_is_the_default_except_for_tokens() -> None:
    config = LlamaConfig.from_hf({**SMALL, "attention_dropout": None, "head_dim": None, "bos_token_id": None})
    assert (config.attention_dropout, config.head_dim, config.bos_token_id) == (0.0, 16, None)


def test_construction_checks_too() -> None:
    with pytest.raises(ValueError, match="num_key_value_heads 3"):
        LlamaConfig(**{**SMALL, "num_key_value_heads": 3})


@pytest.mark.parametrize("window", [None, 1024, 4096])
def test_mistral_without_a_window_is_a_llama(window: int | None) -> None:
    raw = {**SMALL, "model_type": "mistral", "sliding_window": window, "max_position_embeddings": 1024}
    config = LlamaConfig.from_hf(raw)
    assert config == LlamaConfig.from_hf({**SMALL, "max_position_embeddings": 1024})
    assert config.to_hf("bf16")["model_type"] == "llama"


def test_mistral_defaults_are_mistrals() -> None:
    raw = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    raw.update(model_type="mistral", sliding_window=None, num_attention_heads=8)
    theirs = transformers.MistralConfig(**{key: value for key, value in raw.items() if key != "model_type"})
    ours = LlamaConfig.from_hf(raw)
    assert ours.num_key_value_heads == theirs.num_key_value_heads == 8
    assert ours.max_position_embeddings == theirs.max_position_embeddings


def test_unknown_keys_warn_and_harmless_ones_do_not(caplog: pytest.LogCaptureFixture) -> None:
    harmless = {"transformers_version": "5.0.0", "use_cache": False, "architectures": ["LlamaForCausalLM"]}
    with caplog.at_level(logging.WARNING):
        LlamaConfig.from_hf({**SMALL, **harmless})
        assert not caplog.records
        LlamaConfig.from_hf({**SMALL, "num_atention_heads": 8})
    assert "num_atention_heads" in caplog.text and "num_attention_heads?" in caplog.text


def test_sources(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    expected = LlamaConfig.from_hf(SMALL)
    for source in (SMALL, str(tmp_path), str(tmp_path / "config.json")):
        assert load_model_config(source) == expected
    assert read_model_json("llama3.2-1b")["tie_word_embeddings"] is True


def test_unknown_sources_name_the_presets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean llama3-8b\?.*presets: demo, llama2-13b"):
        load_model_config("lama3-8b")
    with pytest.raises(ConfigError, match="neither a preset nor"):
        load_model_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        load_model_config(str(tmp_path))


def test_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"nobody/nothing.*cannot be reached.*hf download nobody/nothing"):
        load_model_config("nobody/nothing")
    (tmp_path / "config.json").write_text(json.dumps(SMALL))

    def cached(repository: str, filename: str, *, local_files_only: bool) -> str:
        assert local_files_only and (repository, filename) == ("meta-llama/Llama-2-7b-hf", "config.json")
        return str(tmp_path / "config.json")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", cached)
    assert load_model_config("meta-llama/Llama-2-7b-hf") == LlamaConfig.from_hf(SMALL)


def test_dtype_names() -> None:
    config = LlamaConfig.from_hf(SMALL)
    assert config.to_hf("float32")["dtype"] == config.to_hf("fp32")["torch_dtype"] == "float32"
    with pytest.raises(ValueError, match="int8"):
        config.to_hf("int8")
