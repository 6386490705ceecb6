"""Every rule of divisibility, with the values that would fit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.config.batch import Batch
from hybrid.config.layout import (
    balanced_split,
    layout_problems,
    microbatch_problems,
    schedule_problems,
    tensor_parallel_sizes,
    world_problems,
)
from hybrid.config.model import LlamaConfig, load_model_config
from hybrid.config.parallel import even_shard, kv_head_shard
from hybrid.config.training import DataConfig, HybridConfig


def model(**changes: Any) -> LlamaConfig:
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5}
    return LlamaConfig.from_hf({**shape, "num_attention_heads": 4, "num_key_value_heads": 2, **changes})


def problems(hybrid: dict[str, Any], **changes: Any) -> list[str]:
    return layout_problems(HybridConfig.model_validate(hybrid), model(**changes))


TP = "tensor_model_parallel_size"
PP = "pipeline_model_parallel_size"


@pytest.mark.parametrize(
    ("hybrid", "changes", "words"),
    [
        ({TP: 4}, {"intermediate_size": 50}, ["intermediate_size 50", f"{TP} 4", "are 1, 2"]),
        ({TP: 4}, {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 36}, ["num_attention_heads 6"]),
        ({TP: 2, "sequence_parallel": True, "data": {"seq_length": 127}}, {}, ["seq_length 127", "126 or 128"]),
        ({PP: 6}, {}, ["num_hidden_layers 5", f"{PP} 6", "1 to 5"]),
        ({PP: 2, "pipeline_split": [3, 3]}, {}, ["[3, 3] covers 6 of num_hidden_layers 5"]),
        ({PP: 2, "pipeline_split": [5]}, {}, ["has 1 numbers", f"{PP} 2"]),
        ({PP: 2, "pipeline_split": [5, 0]}, {}, ["a stage with no layer"]),
        ({PP: 2, "pipeline_chunks": 2}, {}, ["pipeline_chunks 2", "no effect", "1f1b", "interleaved"]),
        ({"pipeline_schedule": "interleaved"}, {}, ["interleaved", f"{PP} 1", "at least 2", "1f1b"]),
        (
            {PP: 2, "pipeline_schedule": "interleaved", "pipeline_chunks": 3},
            {},
            ["num_hidden_layers 5", f"{PP} 2 x pipeline_chunks 3 = 6", "at most 2 pipeline_chunks", "1f1b"],
        ),
        (
            {PP: 2, "pipeline_schedule": "interleaved", "pipeline_split": [3, 2]},
            {},
            ["2 numbers", f"{PP} 2 x pipeline_chunks 2 = 4"],
        ),
        ({"data": {"seq_length": 4096}}, {}, ["seq_length 4096", "2048 positions", "rope_scaling"]),
        ({"recompute": {"granularity": "full", "num_layers": 6}}, {}, ["num_layers 6", "at most 5"]),
        ({"recompute": {"num_layers": 1}}, {}, ["granularity none", "selective or full"]),
    ],
)
def test_violations_name_values_rule_and_remedy(
    hybrid: dict[str, Any], changes: dict[str, Any], words: list[str]
) -> None:
    (problem,) = problems(hybrid, **changes)
    for word in words:
        assert word in problem


def test_heads_that_tensor_parallelism_does_not_divide() -> None:
    found = problems({TP: 3})
    assert len(found) == 2
    assert "num_attention_heads 4" in found[0] and "num_key_value_heads 2" in found[1]
    assert all("values for this model are 1, 2, 4" in problem for problem in found)


@given(heads=st.integers(1, 24), kv=st.integers(1, 24), intermediate=st.integers(1, 48), size=st.integers(1, 24))
def test_the_valid_sizes_are_those_that_can_be_cut(heads: int, kv: int, intermediate: int, size: int) -> None:
    if heads % kv:
        return
    config = model(num_attention_heads=heads, num_key_value_heads=kv, intermediate_size=intermediate, head_dim=8)
    try:
        for rank in range(size):
            even_shard(heads, size, rank)
            even_shard(intermediate, size, rank)
            kv_head_shard(kv, size, rank)
        fits = True
    except ValueError:
        fits = False
    assert (size in tensor_parallel_sizes(config)) == fits
    hybrid = HybridConfig.model_validate({TP: size})
    assert (layout_problems(hybrid, config) == []) == fits


def test_replicated_key_value_heads_and_uneven_layers_are_fine() -> None:
    assert problems({TP: 4, PP: 2, "sequence_parallel": True}, num_key_value_heads=1) == []
    assert problems({PP: 5}) == []


@pytest.mark.parametrize(
    ("scaling", "fits"),
    [
        (None, False),
        ({"rope_type": "linear", "factor": 2.0}, True),
        ({"rope_type": "dynamic", "factor": 2.0}, True),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, True),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}, False),
    ],
)
def test_stretched_rope_has_more_positions(scaling: dict[str, Any] | None, fits: bool) -> None:
    assert (problems({"data": {"seq_length": 4096}}, rope_scaling=scaling) == []) == fits


def test_world_size() -> None:
    hybrid = HybridConfig.model_validate({TP: 2, PP: 2})
    assert world_problems(hybrid, 8) == world_problems(hybrid, None) == []
    (problem,) = world_problems(hybrid, 6)
    assert "world size 6" in problem and "start 4 or 8 ranks" in problem and "one of 1, 2, 3, 6" in problem
    assert "start 4 ranks" in world_problems(hybrid, 2)[0]


@pytest.mark.parametrize(
    ("steps", "rampup", "words"),
    [
        (8, None, []),
        (6, None, ["gradient_accumulation_steps 6", f"{PP} 4", "use 4 or 8", "train_batch_size 48 or 96", "1f1b"]),
        (2, None, ["gradient_accumulation_steps 2", "use 4 (train_batch_size 48)"]),
        (8, {"start": 48, "increment": 48, "samples": 1}, []),
        (8, {"start": 24, "increment": 24, "samples": 1}, ["batch_rampup", "[24, 72]", "multiples of 48"]),
    ],
)
def test_microbatches_of_the_interleaved_schedule(steps: int, rampup: dict[str, int] | None, words: list[str]) -> None:
    interleaved = {PP: 4, "pipeline_schedule": "interleaved", "training": {"batch_rampup": rampup}}
    batch = Batch(global_size=12 * steps, micro_size=2, accumulation_steps=steps, data_parallel_size=6)
    found = microbatch_problems(HybridConfig.model_validate(interleaved), batch)
    assert len(found) == bool(words) and all(word in found[0] for word in words)
    assert microbatch_problems(HybridConfig.model_validate({PP: 4}), batch) == []


def test_decay_steps() -> None:
    def found(**schedule: Any) -> list[str]:
        return schedule_problems(HybridConfig.model_validate({"training": {"lr_schedule": schedule}}))

    assert found(type="wsd", decay_steps=100) == found(type="cosine") == []
    assert "more than train_steps 100" in found(type="wsd", decay_steps=101)[0]
    assert "no effect" in found(type="cosine", decay_steps=10)[0]


def test_the_head_weighs_in_the_split() -> None:
    assert balanced_split(load_model_config("demo"), 2, 256) == (2, 2)
    llama3 = balanced_split(load_model_config("llama3-8b"), 4, 8192)
    assert sum(llama3) == 32 and llama3[-1] < min(llama3[:-1])
    without_vocabulary = balanced_split(model(num_hidden_layers=8, vocab_size=1), 4, DataConfig().seq_length)
    assert without_vocabulary == (2, 2, 2, 2)
