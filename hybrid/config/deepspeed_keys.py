"""The keys of DeepSpeed's configuration: those with an effect here, and those that cannot work, with the reason.

DeepSpeed itself accepts any unknown top-level key in silence, so a typing mistake there would go unnoticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A set of JSON values."""

    name: str
    """Completes "it must be ..."."""
    accepts: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    """Python reads NaN and Infinity where JSON has no such numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    """JSON writers turn 5e8 into a float."""
    return _is_number(value) and float(value).is_integer()


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_is_number(v) and 0 <= v < 1 for v in value)


BOOL = Kind("true or false", lambda v: isinstance(v, bool))
STRING = Kind("a string", lambda v: isinstance(v, str))
STRING_OR_NULL = Kind("a string or null", lambda v: v is None or isinstance(v, str))
STRINGS = Kind("a list of strings", lambda v: isinstance(v, list) and all(isinstance(s, str) for s in v))
NUMBER = Kind("a number", _is_number)
NOT_NEGATIVE = Kind("a number of at least 0", lambda v: _is_number(v) and v >= 0)
COUNT = Kind("a whole number of at least 1", lambda v: _is_whole(v) and v >= 1)
COUNT_OR_ZERO = Kind("a whole number of at least 0", lambda v: _is_whole(v) and v >= 0)
BATCH = Kind('a whole number of at least 1, or "auto"', lambda v: True)  # hybrid.config.batch checks it
BUCKET = Kind('a whole number of at least 1, or "auto"', lambda v: v == "auto" or (_is_whole(v) and v >= 1))
STAGE = Kind("0, 1 or 2", lambda v: _is_whole(v) and not isinstance(v, float) and v in (0, 1, 2))
DTYPE = Kind("fp32, bf16 or fp16", lambda v: v in ("fp32", "bf16", "fp16"))
BETAS = Kind("a list of two numbers in [0, 1)", _is_pair)


@dataclass(frozen=True)
class Key:
    """A key that may be given."""

    kind: Kind
    only: tuple[Any, ...] = ()
    """The values that work here, where the others would break or be ignored; empty: all of the kind."""
    because: str = ""
    """Why, and what to do instead."""


_STAGE3 = "it belongs to ZeRO-3; remove it"
_ONE_BUFFER = "gradients always live in contiguous buckets that are reduce-scattered; remove it"
_EXACT_SCALE = "gradients are summed and divided once by the exact token count, so nothing is left to scale; remove it"
_FP32_STATE = "master weights, gradients and moments are fp32; remove it"

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

KEYS: dict[str, Key] = {
    **{name: Key(BATCH) for name in _BATCH_KEYS},
    "gradient_clipping": Key(NOT_NEGATIVE),
    "communication_data_type": Key(DTYPE),
    "steps_per_print": Key(COUNT),
    "dump_state": Key(BOOL),
    "wall_clock_breakdown": Key(BOOL),
    "memory_breakdown": Key(BOOL),
    "disable_python_gc": Key(BOOL),
    "log_level": Key(STRING),
    "prescale_gradients": Key(BOOL, (False,), _EXACT_SCALE),
    "gradient_predivide_factor": Key(NUMBER, (1.0,), _EXACT_SCALE),
    "gradient_allreduce_op": Key(STRING, ("mean",), _EXACT_SCALE),
    "managed_gradient_accumulation": Key(BOOL, (True,), "the pipeline schedule accumulates; remove it"),
    "disable_allgather": Key(BOOL, (False,), "sharded parameters are always gathered; remove it"),
    "seq_parallel_communication_data_type": Key(STRING, ("fp32",), "it belongs to Ulysses; remove it"),
    "dataloader_drop_last": Key(BOOL, (False,), "the samples of a run are set by hybrid.data; remove it"),
    "zero_allow_untested_optimizer": Key(BOOL),
    "zero_force_ds_cpu_optimizer": Key(BOOL, (False,), "there is no optimizer offload here; set it to false"),
    "bf16.enabled": Key(BOOL),
    "bf16.immediate_grad_update": Key(BOOL),
    "bf16.check_grad_overflow": Key(BOOL, (True,), "a step with non-finite gradients is always skipped; remove it"),
    "bf16.bf16_master_weights_and_grads": Key(BOOL, (False,), _FP32_STATE),
    "bf16.bf16_optimizer_states": Key(BOOL, (False,), _FP32_STATE),
    "fp16.enabled": Key(BOOL),
    "fp16.loss_scale": Key(NOT_NEGATIVE),
    "fp16.initial_scale_power": Key(COUNT_OR_ZERO),
    "fp16.loss_scale_window": Key(COUNT),
    "fp16.hysteresis": Key(COUNT),
    "fp16.consecutive_hysteresis": Key(BOOL),
    "fp16.min_loss_scale": Key(COUNT),
    "fp16.auto_cast": Key(BOOL, (False,), "the inputs are token ids; remove it"),
    "fp16.fp16_master_weights_and_grads": Key(BOOL, (False,), _FP32_STATE),
    "zero_optimization.stage": Key(STAGE),
    "zero_optimization.reduce_bucket_size": Key(BUCKET),
    "zero_optimization.allgather_bucket_size": Key(BUCKET),
    "zero_optimization.overlap_comm": Key(BOOL),
    "zero_optimization.contiguous_gradients": Key(BOOL, (True,), _ONE_BUFFER),
    "zero_optimization.reduce_scatter": Key(BOOL, (True,), _ONE_BUFFER),
    "zero_optimization.allgather_partitions": Key(BOOL, (True,), _ONE_BUFFER),
    "zero_optimization.use_multi_rank_bucket_allreduce": Key(BOOL, (True,), _ONE_BUFFER),
    "zero_optimization.round_robin_gradients": Key(BOOL, (False,), _ONE_BUFFER),
    "zero_optimization.load_from_fp32_weights": Key(BOOL, (True,), "checkpoints hold the fp32 weights; remove it"),
    "zero_optimization.elastic_checkpoint": Key(BOOL, (False,), "every checkpoint loads at any layout; remove it"),
    "zero_optimization.ignore_unused_parameters": Key(BOOL, (True,), "an unused parameter has gradient 0; remove it"),
    "zero_optimization.compute_grad_norm": Key(BOOL, (True,), "the norm is always in metrics.jsonl; remove it"),
    "zero_optimization.parameter_alignment": Key(BOOL, (False,), "buckets have their own alignment; remove it"),
    "zero_optimization.legacy_stage1": Key(BOOL, (False,), "there is one stage 1 here; remove it"),
    "zero_optimization.zero_hpz_partition_size": Key(COUNT, (1,), "it belongs to ZeRO++; remove it"),
    "optimizer.type": Key(STRING),
    "optimizer.legacy_fusion": Key(BOOL, (False,), "torch's fused optimizers are used; remove it"),
    "scheduler.type": Key(STRING),
    "pipeline.pipe_partitioned": Key(
        BOOL, (False,), "it silently corrupts sequence-parallel activations; set it to false, or remove it"
    ),
    "pipeline.grad_partitioned": Key(
        BOOL, (False,), "it silently corrupts sequence-parallel gradients; set it to false, or remove it"
    ),
    "pipeline.use_reentrant": Key(
        BOOL, (False,), "reentrant recomputation loses the embedding's gradient; set it to false, or remove it"
    ),
    "pipeline.activation_checkpoint_interval": Key(COUNT_OR_ZERO, (0,), "set hybrid.recompute instead"),
    "pipeline.stages": Key(STRING, ("auto",), "set hybrid.pipeline_model_parallel_size instead"),
    "pipeline.partition": Key(STRING, ("best",), "set hybrid.pipeline_split instead"),
    "pipeline.seed_layers": Key(BOOL, (False,), "weights depend on hybrid.training.seed and their names only"),
    "tensor_parallel.autotp_size": Key(
        COUNT_OR_ZERO, (0, 1), "AutoTP would rewrite the model; set hybrid.tensor_model_parallel_size instead"
    ),
    "data_types.grad_accum_dtype": Key(STRING, ("fp32",), "gradients are accumulated in fp32; remove it"),
    "tensorboard.enabled": Key(BOOL),
    "tensorboard.output_path": Key(STRING),
    "tensorboard.job_name": Key(STRING),
    "wandb.enabled": Key(BOOL),
    "wandb.group": Key(STRING_OR_NULL),
    "wandb.team": Key(STRING_OR_NULL),
    "wandb.project": Key(STRING),
    "csv_monitor.enabled": Key(BOOL),
    "csv_monitor.output_path": Key(STRING),
    "csv_monitor.job_name": Key(STRING),
    "comms_logger.enabled": Key(BOOL),
    "comms_logger.prof_all": Key(BOOL),
    "comms_logger.prof_ops": Key(STRINGS),
    "comms_logger.verbose": Key(BOOL),
    "comms_logger.debug": Key(BOOL),
    "flops_profiler.enabled": Key(BOOL),
    "flops_profiler.recompute_fwd_factor": Key(NOT_NEGATIVE),
    "flops_profiler.profile_step": Key(COUNT_OR_ZERO),
    "flops_profiler.module_depth": Key(Kind("a whole number", _is_whole)),
    "flops_profiler.top_modules": Key(COUNT),
    "flops_profiler.detailed": Key(BOOL),
    "flops_profiler.output_file": Key(STRING_OR_NULL),
}
"""Every key that may be given, by dotted path; `optimizer.params` and `scheduler.params` depend on the type."""

_OFFLOAD = "the optimizer's state stays on the device, sharded; use more data-parallel ranks or hybrid.recompute"
_QUANTIZED = "ZeRO++ is not supported: weights and gradients travel unquantized; set communication_data_type to bf16"
_REMOVED = "DeepSpeed has removed it; remove it here as well"

REFUSED: dict[str, str] = {
    "zero_optimization.offload_optimizer": _OFFLOAD,
    "zero_optimization.offload_param": _OFFLOAD,
    "zero_optimization.cpu_offload": _OFFLOAD,
    "zero_optimization.cpu_offload_params": _OFFLOAD,
    "zero_optimization.cpu_offload_param": _OFFLOAD,
    "zero_optimization.cpu_offload_use_pin_memory": _OFFLOAD,
    "zero_optimization.zenflow": _OFFLOAD,
    "zero_optimization.save_muon_momentum_buffer_in_memory": "Muon is not supported; remove it",
    "zero_optimization.zero_quantized_weights": _QUANTIZED,
    "zero_optimization.zero_quantized_nontrainable_weights": _QUANTIZED,
    "zero_optimization.zero_quantized_gradients": _QUANTIZED,
    "zero_optimization.zeropp_loco_param": _REMOVED,
    "zero_optimization.mics_shard_size": _REMOVED,
    "zero_optimization.mics_hierarchical_params_gather": _REMOVED,
    "zero_optimization.leaf_module": _STAGE3,
    "zero_optimization.memory_efficient_linear": _STAGE3,
    "zero_optimization.override_module_apply": _STAGE3,
    "zero_optimization.log_trace_cache_warnings": _STAGE3,
    "zero_optimization.enable_sanity_checks": _STAGE3,
    "zero_optimization.pipeline_loading_checkpoint": _STAGE3,
    "zero_optimization.sub_group_size": _STAGE3,
    "zero_optimization.stage3_prefetch_bucket_size": _STAGE3,
    "zero_optimization.stage3_param_persistence_threshold": _STAGE3,
    "zero_optimization.stage3_model_persistence_threshold": _STAGE3,
    "zero_optimization.stage3_max_live_parameters": _STAGE3,
    "zero_optimization.stage3_max_reuse_distance": _STAGE3,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _STAGE3,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _STAGE3,
    "zero_optimization.stage3_module_granularity_threshold": _STAGE3,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _STAGE3,
    "zero_optimization.stage3_allgather_sequential": _STAGE3,
    "hybrid_engine": "it alternates training and generation for RLHF; remove it",
    "elasticity": _REMOVED,
    "progressive_layer_drop": _REMOVED,
    "sparse_attention": _REMOVED,
    "eigenvalue": _REMOVED,
    "quantize_training": _REMOVED,
    "curriculum_learning": "the samples are a function of seed, epoch and index only; remove it",
    "data_efficiency": "the samples are a function of seed, epoch and index only; remove it",
    "amp": "apex AMP would cast the model behind the optimizer's back; set bf16.enabled or fp16.enabled",
    "torch_autocast": "every layer runs in the dtype of its weights; set bf16.enabled or fp16.enabled",
    "sparse_gradients": "the embedding's gradient is dense, in the optimizer's buckets; remove it",
    "compression_training": "pruning and quantization change layers that are sharded here; remove it",
    "weight_quantization": "training weights are not quantized; remove it",
    "activation_checkpointing": "set hybrid.recompute instead",
    "checkpoint": "checkpoints are this package's own; set hybrid.training.save_every and resume",
    "datastates_ckpt": "checkpoints are this package's own; set hybrid.training.save_every and resume",
    "aio": "it belongs to NVMe offload; " + _OFFLOAD,
    "autotuning": "it restarts the script with layouts it cannot know here; set the layout in hybrid",
    "compile": "the engine does not compile the model; remove it",
    "expert_parallel": "LLaMA has no experts; remove it",
    "use_data_before_expert_parallelism": "LLaMA has no experts; remove it",
    "sequence_parallel_size": "it belongs to Ulysses; set hybrid.sequence_parallel",
    "data_types.param_dtype": "set bf16.enabled or fp16.enabled",
    "data_types.buffer_dtype": "RoPE tables are fp32; remove it",
    "comet": "only the tensorboard, wandb and csv_monitor sections are supported",
    "bfloat16": "write bf16",
    "vocabulary_size": "the vocabulary is that of hybrid.model; remove it",
}
"""Features that cannot work or would be ignored, with reason and remedy; a switched-off one passes."""

SECTIONS = frozenset(path.rpartition(".")[0] for path in [*KEYS, *REFUSED] if "." in path) | {
    "optimizer.params",
    "scheduler.params",
}
