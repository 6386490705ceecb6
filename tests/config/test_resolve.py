"""From a tree to a RunConfig: what is decided, and that every violation is listed at once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hybrid.config.errors import ConfigError
from hybrid.config.model import num_parameters
from hybrid.config.resolve import resolve_config
from hybrid.config.run import RunConfig

MODEL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def resolve(
    hybrid: dict[str, Any] | None = None, world_size: int | None = 1, *, model: dict[str, Any] | None = None, **ds: Any
) -> RunConfig:
    section = {"model": {**MODEL, **(model or {})}, **(hybrid or {})}
    return resolve_config({"train_micro_batch_size_per_gpu": 1, **ds, "hybrid": section}, world_size)


def violations(*args: Any, **kwargs: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        resolve(*args, **kwargs)
    message = str(caught.value)
    for number, violation in enumerate(caught.value.violations, start=1):
        assert f"\n  {number}. {violation}" in message
    return caught.value.violations


def matching(found: tuple[str, ...], *words: str) -> str:
    (one,) = [violation for violation in found if all(word in violation for word in words)]
    return one


TP = "tensor_model_parallel_size"
PP = "pipeline_model_parallel_size"


def test_defaults() -> None:
    run = resolve()
    assert (run.precision, run.zero_stage, run.gradient_clipping, run.communication_dtype) == ("fp32", 0, 1.0, "fp32")
    assert run.optimizer_type == "AdamW"
    assert run.optimizer_params == {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    assert run.layers_per_stage == (5,)
    assert run.hybrid.training.lr_schedule is not None and run.hybrid.training.lr_schedule.type == "cosine"
    assert run.tokens_per_step == 512


def test_the_grid_is_solved_from_the_world_size() -> None:
    run = resolve({TP: 2, PP: 2, "sequence_parallel": True}, 12, train_batch_size=12)
    assert run.parallel.data_parallel_size == 3 and run.parallel.world_size == 12 and run.parallel.sequence_parallel
    assert (run.micro_batch_size, run.gradient_accumulation_steps, run.global_batch_size) == (1, 4, 12)
    assert sum(run.layers_per_stage) == 5 and len(run.layers_per_stage) == 2


def test_a_dry_run_takes_the_replicas_of_the_batch_triple() -> None:
    run = resolve({TP: 2}, None, train_batch_size=8, gradient_accumulation_steps=2)
    assert (run.parallel.data_parallel_size, run.parallel.world_size) == (4, 8)
    assert resolve({TP: 2}, None, train_batch_size=8).parallel.world_size == 2


def test_the_batch_triple_uses_the_data_parallel_size() -> None:
    run = resolve({TP: 2}, 4, gradient_accumulation_steps=2, train_batch_size=4)
    assert run.parallel.data_parallel_size == 2
    (problem,) = violations({TP: 2}, 4, gradient_accumulation_steps=2, train_batch_size=5)
    assert "train_micro_batch_size_per_gpu 1 x gradient_accumulation_steps 2 x data-parallel size 2" in problem
    assert "(world size 4 / (tensor 2 x pipeline 1)) = 4" in problem


@pytest.mark.parametrize(
    ("ds", "precision"),
    [({}, "fp32"), ({"bf16": {"enabled": True}}, "bf16"), ({"fp16": {"enabled": True}}, "fp16")],
)
def test_precision(ds: dict[str, Any], precision: str) -> None:
    assert resolve(**ds).precision == precision


def test_bucket_size() -> None:
    big = {"model": "llama3-8b"}
    assert resolve(hybrid=big).reduce_bucket_size == 40_000_000
    assert resolve(world_size=64, hybrid=big).reduce_bucket_size == 64_000_000
    # A small model still has several: the last one's reduction has no backward to run behind.
    demo = resolve()
    assert demo.reduce_bucket_size == -(-num_parameters(demo.model) // 20)
    halves = resolve(world_size=2, hybrid={"tensor_model_parallel_size": 2})
    assert halves.reduce_bucket_size == -(-num_parameters(demo.model) // 40)
    assert resolve(zero_optimization={"reduce_bucket_size": 5e8}).reduce_bucket_size == 500_000_000


def test_overlap_comm_is_our_overlap() -> None:
    assert resolve().hybrid.optimizer.overlap
    assert not resolve(zero_optimization={"overlap_comm": False}).hybrid.optimizer.overlap
    (problem,) = violations({"optimizer": {"overlap": True}}, zero_optimization={"overlap_comm": False})
    assert "they mean the same" in problem


def test_one_learning_rate_schedule() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}
    assert resolve(scheduler=scheduler).hybrid.training.lr_schedule is None
    with pytest.raises(ConfigError, match="lr_schedule is null and there is no scheduler"):
        resolve(hybrid={"training": {"lr_schedule": None}})
    training = {"lr_schedule": {"type": "constant"}}
    (problem,) = violations({"training": training}, scheduler=scheduler)
    assert "scheduler and hybrid.training.lr_schedule" in problem and "remove one" in problem


@pytest.mark.parametrize(
    ("hybrid", "world_size", "ds"),
    [
        ({}, 1, {}),
        ({TP: 2, PP: 2, "recompute": "full"}, 8, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}),
        ({}, 2, {"scheduler": {"type": "WarmupLR"}, "optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}),
        ({}, 1, {"optimizer": {"type": "adam"}, "zero_optimization": {"overlap_comm": False, "stage": 1}}),
        ({"pipeline_split": [2, 3], PP: 2}, 2, {"fp16": {"enabled": True}, "optimizer": {"type": "sgd"}}),
    ],
)
def test_the_resolved_file_gives_the_same_run(hybrid: dict[str, Any], world_size: int, ds: dict[str, Any]) -> None:
    run = resolve(hybrid, world_size, **ds)
    again = resolve_config(json.loads(run.to_json()), world_size)
    assert again.to_json() == run.to_json()
    for name in ("model", "parallel", "optimizer_type", "optimizer_params", "layers_per_stage", "reduce_bucket_size"):
        assert getattr(again, name) == getattr(run, name)


def test_the_given_tree_is_left_alone() -> None:
    tree = {"train_batch_size": 4, "hybrid": {"recompute": "full"}, "zero_optimization": {"overlap_comm": True}}
    before = json.dumps(tree)
    resolve_config(tree, 2)
    assert json.dumps(tree) == before


def test_every_kind_of_violation_is_listed_at_once() -> None:
    found = violations(
        {
            TP: 4,
            PP: 6,
            "sequence_parallel": True,
            "pipeline_split": [1, 2],
            "data": {"seq_length": 127, "text_kye": "t"},
            "training": {"train_steps": "many"},
            "modle": "demo",
        },
        6,
        model={"num_key_value_heads": 3, "intermediate_size": 50, "hidden_act": "gelu"},
        train_batch_size=5,
        gradient_accumulation_steps=2,
        zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}},
        optimizer={"type": "Muon"},
        tensor_parallel={"autotp_size": 2},
        pipeline={"pipe_partitioned": True},
        wall_clock_breakdown=True,
        gradient_cliping=1.0,
    )
    for words in (
        ("unknown key hybrid.modle", "hybrid.model"),
        ("unknown key hybrid.data.text_kye", "hybrid.data.text_key"),
        ('hybrid.training.train_steps is "many"',),
        ("num_attention_heads 4", "num_key_value_heads 3"),
        ('hidden_act "gelu"',),
        ("world size 6",),
        ("num_key_value_heads 3", f"{TP} 4"),
        ("intermediate_size 50",),
        ("num_hidden_layers 5", f"{PP} 6", "1 to 5"),
        ("pipeline_split [1, 2]", "one per stage"),
        ("pipeline_split [1, 2]", "covers 3"),
        ("seq_length 127",),
        ("train_batch_size is 5",),
        ("stage 3",),
        ("offload_optimizer",),
        ("'Muon'",),
        ("autotp_size",),
        ("pipe_partitioned",),
        ("wall_clock_breakdown",),
        ("unknown key gradient_cliping", "gradient_clipping"),
    ):
        matching(found, *words)
    assert len(found) == 20


def test_the_sizes_of_public_reports() -> None:
    matching(violations({TP: 2, PP: 2}, 6), "world size 6", "4 or 8", "1, 2, 3, 6")
    matching(violations({TP: 3}, 3), "num_attention_heads 4", "1, 2, 4")
    hybrid = {TP: 2, "sequence_parallel": True, "data": {"seq_length": 127}}
    matching(violations(hybrid, 2), "seq_length 127", "126 or 128")
    matching(violations({TP: 4}, 4, model={"intermediate_size": 50}), "intermediate_size 50", "1, 2")
    matching(violations({}, 1, model={"num_key_value_heads": 3}), "num_key_value_heads 3", "1, 2, 4")


def test_a_broken_model_does_not_hide_the_rest() -> None:
    found = violations({"model": "llama9", TP: 2}, 3, zero_optimization={"stage": 3})
    assert len(found) == 3
    matching(found, "model 'llama9'", "presets")


@pytest.mark.parametrize("hybrid", [None, [], "demo"])
def test_a_section_that_is_no_object(hybrid: Any) -> None:
    with pytest.raises(ConfigError, match="hybrid is .*: it must be an object"):
        resolve_config({"train_batch_size": 1, "hybrid": hybrid}, 1)


def test_a_file_without_our_section_trains_the_demo() -> None:
    assert resolve_config({"train_batch_size": 2}, 1).model.vocab_size == 2048


def test_rules_are_in_the_words_of_json() -> None:
    wrong = {"data": 5, "training": "x", "model": 7, "pipeline_split": "4", "recompute": True}
    with pytest.raises(ConfigError) as error:
        resolve_config({"train_batch_size": 4, "hybrid": wrong}, world_size=1)
    text = str(error.value)
    for line in (
        "hybrid.data is 5: it must be an object",
        'hybrid.training is "x": it must be an object',
        "hybrid.model is 7: it must be a string or an object",
        'hybrid.pipeline_split is "4": it must be a list',
        "hybrid.recompute is true: it must be an object",
    ):
        assert line in text


def test_what_is_missing_and_how_time_is_written_are_named() -> None:
    found = violations({"training": {"batch_rampup": {"start": 3}, "max_wall_time": "1h"}}, 1)
    matching(found, 'batch_rampup is {"start": 3}: it must be an object with increment and samples too')
    matching(found, 'max_wall_time is "1h": it must be seconds, or H:MM:SS as in 1:30:00')


@pytest.mark.parametrize("targets", [[], ["q_proj", "v_proj", "q_proj"]])
def test_adapted_projections_are_named_once(targets: list[str]) -> None:
    found = violations({"lora": {"targets": targets}}, 1)
    matching(found, f"hybrid.lora.targets is {json.dumps(targets)}: it must be at least one projection")


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({"optimizer": {"params": {"lr": float("inf")}}}, "optimizer.params.lr"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping"),
        ({"hybrid": {"model": {**MODEL, "initializer_range": float("inf")}}}, "initializer_range"),
        ({"hybrid": {"model": {**MODEL, "rope_theta": float("inf")}}}, "rope_theta"),
    ],
)
def test_numbers_are_finite(section: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        resolve_config({"train_batch_size": 4, **section}, world_size=1)


def test_batch_rampup() -> None:
    rampup = {"start": 2, "increment": 2, "samples": 10}
    run = resolve({"training": {"batch_rampup": rampup}}, train_batch_size=6)
    assert [run.batch_size_at(consumed) for consumed in (0, 4, 5, 9, 10)] == [2, 2, 4, 4, 6]
    assert resolve(train_batch_size=6).batch_size_at(0) == 6
    found = violations({"training": {"batch_rampup": {**rampup, "increment": 3}}}, train_batch_size=6)
    matching(found, "batch_rampup", "by 3", "does not arrive")
    found = violations({"training": {"batch_rampup": rampup}}, train_batch_size=6, train_micro_batch_size_per_gpu=3)
    matching(found, "batch_rampup", "[2, 4]", "micro batch 3")
