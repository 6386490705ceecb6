"""DeepSpeed's keys: none goes by unread, and what is handed on suits the installed DeepSpeed."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from hybrid.config.deepspeed import deepspeed_config, deepspeed_problems, is_off, known_paths, scheduler_of
from hybrid.config.resolve import resolve_config

FEATURES = [
    ({"zero_optimization": {"stage": 3}}, ["stage 3", "use stage 2"]),
    ({"zero_optimization": {"stage": 4}}, ["stage is 4", "0, 1 or 2"]),
    ({"zero_optimization": {"stage": "2"}}, ['stage is "2"', "0, 1 or 2"]),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, ["offload_optimizer", "recompute"]),
    ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, ["offload_param"]),
    ({"zero_optimization": {"zero_quantized_gradients": True}}, ["zero_quantized_gradients", "ZeRO++"]),
    ({"zero_optimization": {"zero_hpz_partition_size": 8}}, ["zero_hpz_partition_size 8", "ZeRO++"]),
    ({"zero_optimization": {"reduce_scatter": False}}, ["reduce_scatter false", "remove it"]),
    ({"zero_optimization": {"allgather_bucket_size": 5e8}}, ["allgather_bucket_size", "reduce_bucket_size"]),
    ({"tensor_parallel": {"autotp_size": 2}}, ["autotp_size 2", "hybrid.tensor_model_parallel_size"]),
    ({"pipeline": {"pipe_partitioned": True}}, ["pipe_partitioned true", "false"]),
    ({"pipeline": {"grad_partitioned": True}}, ["grad_partitioned true"]),
    ({"pipeline": {"use_reentrant": True}}, ["use_reentrant true"]),
    ({"pipeline": {"activation_checkpoint_interval": 1}}, ["hybrid.recompute"]),
    ({"hybrid_engine": {"enabled": True}}, ["hybrid_engine"]),
    ({"elasticity": {"enabled": True}}, ["elasticity"]),
    ({"curriculum_learning": {"enabled": True}}, ["curriculum_learning"]),
    ({"data_efficiency": {"enabled": True}}, ["data_efficiency"]),
    ({"amp": {"enabled": True}}, ["amp", "bf16.enabled"]),
    ({"torch_autocast": {"enabled": True}}, ["torch_autocast", "bf16.enabled"]),
    ({"sparse_gradients": True}, ["sparse_gradients"]),
    ({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}}, ["compression"]),
    ({"activation_checkpointing": {"partition_activations": True}}, ["hybrid.recompute"]),
    ({"prescale_gradients": True}, ["prescale_gradients true", "token count"]),
    ({"gradient_predivide_factor": 2.0}, ["gradient_predivide_factor 2.0"]),
    ({"gradient_allreduce_op": "sum"}, ["gradient_allreduce_op"]),
    ({"bf16": {"bf16_master_weights_and_grads": True}}, ["bf16_master_weights_and_grads", "fp32"]),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, ["both true", "one precision"]),
    ({"bf16": {"enabled": "auto"}}, ['bf16.enabled is "auto"', "true or false"]),
    ({"bf16": True}, ["bf16 is true", "an object"]),
    ({"communication_data_type": "int8"}, ["communication_data_type", "fp32, bf16 or fp16"]),
    ({"gradient_clipping": -1}, ["gradient_clipping is -1"]),
    ({"optimizer": {"type": "Muon"}}, ["'Muon'", "elementwise", "AdamW"]),
    ({"optimizer": {"type": "OneBitAdam"}}, ["'OneBitAdam'", "elementwise"]),
    ({"optimizer": {"type": "Adafactor"}}, ["'Adafactor'", "Adam, AdamW, SGD, Lion"]),
    ({"scheduler": {"type": "Cosine"}}, ['scheduler.type "Cosine"', "WarmupCosineLR"]),
]


@pytest.mark.parametrize(("tree", "words"), FEATURES, ids=lambda value: str(value)[:50])
def test_refused_with_reason_and_remedy(tree: dict[str, Any], words: list[str]) -> None:
    problems = deepspeed_problems(tree, 1)
    assert len(problems) == 1
    for word in words:
        assert word in problems[0]


@pytest.mark.parametrize(
    "tree",
    [
        {"zero_optimization": {"offload_optimizer": {"device": "none"}, "offload_param": None}},
        {"hybrid_engine": {"enabled": False}, "amp": {"enabled": False}, "sparse_gradients": False, "elasticity": {}},
        {"tensor_parallel": {"autotp_size": 1}, "zero_optimization": {"zero_quantized_weights": False}},
        {"pipeline": {"pipe_partitioned": False, "grad_partitioned": False, "use_reentrant": False}},
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8}},
        {"zero_optimization": {"contiguous_gradients": True, "reduce_scatter": True, "allgather_partitions": True}},
        {"wall_clock_breakdown": True, "flops_profiler": {"enabled": True}},
        {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "min_loss_scale": 1}},
    ],
)
def test_switched_off_or_what_happens_anyway_passes(tree: dict[str, Any]) -> None:
    assert deepspeed_problems(tree, 1) == []


@pytest.mark.parametrize(
    ("tree", "path", "suggestion"),
    [
        ({"train_batchsize": 4}, "train_batchsize", "train_batch_size"),
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation", "zero_optimization"),
        ({"zero_optimization": {"stag": 2}}, "zero_optimization.stag", "zero_optimization.stage"),
        ({"bf16": {"enable": True}}, "bf16.enable", "bf16.enabled"),
        ({"fp16": {"loss_scale_windows": 1}}, "fp16.loss_scale_windows", "fp16.loss_scale_window"),
        ({"pipeline": {"pipe_partition": False}}, "pipeline.pipe_partition", "pipeline.pipe_partitioned"),
        ({"csv_monitor": {"outputpath": ""}}, "csv_monitor.outputpath", "csv_monitor.output_path"),
        ({"comms_logger": {"verbos": True}}, "comms_logger.verbos", "comms_logger.verbose"),
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size", "hybrid.tensor_model_parallel_size"),
        ({"stage": 2}, "stage", "zero_optimization.stage"),
        ({"optimizer": {"typ": "Adam"}}, "optimizer.typ", "optimizer.type"),
        ({"optimizer": {"params": {"beta": [0.9, 0.9]}}}, "optimizer.params.beta", "optimizer.params.betas"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}}},
            "scheduler.params.warmup_steps",
            "scheduler.params.warmup_num_steps",
        ),
    ],
)
def test_unknown_keys_at_any_level_name_the_nearest(tree: dict[str, Any], path: str, suggestion: str) -> None:
    assert deepspeed_problems(tree, 1) == [f"unknown key {path}: did you mean {suggestion}?"]


def test_profilers_need_one_stage() -> None:
    problems = deepspeed_problems({"wall_clock_breakdown": True, "flops_profiler": {"enabled": True}}, 2)
    assert [problem.split()[0] for problem in problems] == ["wall_clock_breakdown", "flops_profiler"]


@pytest.mark.parametrize(
    ("section", "model"),
    [
        ("bf16", DeepSpeedBF16Config),
        ("fp16", DeepSpeedFP16Config),
        ("zero_optimization", DeepSpeedZeroConfig),
        ("tensorboard", TensorBoardConfig),
        ("wandb", WandbConfig),
        ("csv_monitor", CSVConfig),
    ],
)
def test_no_key_of_the_installed_deepspeed_is_called_unknown(section: str, model: Any) -> None:
    """A user who ports a file gets the reason for each key that does not work, not "unknown key"."""
    names = {field.alias or name for name, field in model.model_fields.items()}
    assert {f"{section}.{name}" for name in names} - known_paths() == set()


def test_off() -> None:
    value: object
    for value in (False, None, 0, {}, {"enabled": False, "size": 4}, {"device": "none", "pin_memory": True}, {"a": 0}):
        assert is_off(value)
    for value in (True, 1, {"enabled": True}, {"device": "cpu"}, {"a": 0, "b": 1}):
        assert not is_off(value)


@pytest.mark.parametrize(
    "tree",
    [
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "csv_monitor": {"enabled": True}},
        {"fp16": {"enabled": True, "initial_scale_power": 8}, "gradient_clipping": 0.5},
        {"hybrid": {"pipeline_model_parallel_size": 1}, "comms_logger": {"enabled": True}},
    ],
)
def test_deepspeed_reads_what_it_is_handed(tree: dict[str, Any]) -> None:
    run = resolve_config({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, **tree}, world_size=1)
    handed = deepspeed_config(run)
    read = DeepSpeedConfig(handed)
    assert (read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (8, 2, 4)
    assert read.zero_optimization_stage == 1
    assert read.gradient_clipping == run.gradient_clipping
    # It would refuse fp16 on some CPUs, and the weights have their dtype already.
    assert not read.bfloat16_config.enabled and not read.float16_config.enabled
    assert read.monitor_config.csv_monitor.enabled == ("csv_monitor" in tree)
    assert not read.pipeline["pipe_partitioned"] and not read.pipeline["grad_partitioned"]
    assert read.pipeline["use_reentrant"] is False and read.pipeline["activation_checkpoint_interval"] == 0
    assert not handed.keys() & {"optimizer", "scheduler", "hybrid"}


def test_scheduler_of() -> None:
    section = {"type": "warmuplr", "params": {"warmup_num_steps": 5}}
    assert scheduler_of({"scheduler": section}) == ("WarmupLR", {"warmup_num_steps": 5})
    assert scheduler_of({}) is None


def test_a_monitor_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"tensorboard": {"enabled": True}, "wandb": {"enabled": True}, "csv_monitor": {"enabled": True}}
    monkeypatch.setattr("hybrid.config.deepspeed.find_spec", lambda name: None if name == "wandb" else object())
    (problem,) = deepspeed_problems(tree, 1)
    assert "wandb.enabled" in problem and "pip install wandb" in problem
    assert not deepspeed_problems({"wandb": {"enabled": False}}, 1)
