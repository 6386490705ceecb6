"""DeepSpeed's part of the configuration: checked on the way in, reduced to what its engine may see on the way out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hybrid.config.deepspeed_keys import KEYS, REFUSED, SECTIONS
from hybrid.config.errors import shown, unknown_key
from hybrid.config.optimizer import (
    OPTIMIZER_KEYS,
    SCHEDULER_KEYS,
    canonical,
    check_value,
    optimizer_problems,
    scheduler_problems,
)
from hybrid.config.training import hybrid_paths

if TYPE_CHECKING:
    from hybrid.config.run import RunConfig

_PASSED_ON = (
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comms_logger",
    "flops_profiler",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "disable_python_gc",
    "log_level",
)
"""Sections and keys whose work DeepSpeed's engine does."""

_OPTIONAL_PACKAGES = ("tensorboard", "wandb")
"""Monitors whose sections are named like the package they need."""

_OWN_SECTIONS = ("optimizer.params", "scheduler.params")


def known_paths() -> set[str]:
    """Every dotted path outside `hybrid` that a file may hold."""
    paths = KEYS.keys() | REFUSED.keys() | SECTIONS
    for section, types in (("optimizer", OPTIMIZER_KEYS), ("scheduler", SCHEDULER_KEYS)):
        paths |= {f"{section}.params.{name}" for keys in types.values() for name in keys}
    return paths


def is_off(value: object) -> bool:
    """Whether the value of a feature switches it off: false, null, zero, or a section that says so."""
    if isinstance(value, Mapping):
        if "enabled" in value:
            return not value["enabled"]
        if value.get("device") == "none":
            return True
        return all(is_off(inner) for inner in value.values())
    return not value


def deepspeed_problems(tree: Mapping[str, Any], pipeline_model_parallel_size: int) -> list[str]:
    """All that is wrong with the keys outside `hybrid`, the batch triple aside."""
    found = list(_walk(tree, ""))
    for section, check in (("optimizer", optimizer_problems), ("scheduler", scheduler_problems)):
        if isinstance(tree.get(section), Mapping):
            found += check(tree[section])
    if _enabled(tree, "bf16") and _enabled(tree, "fp16"):
        found.append("bf16.enabled and fp16.enabled are both true: a run has one precision; set one to false")
    buckets = _section(tree, "zero_optimization")
    wire = tree.get("communication_data_type", "fp32")
    if wire in ("bf16", "fp16") and buckets.get("stage", 0) == 0:
        found.append(
            f"communication_data_type {shown(wire)} needs sharded gradients, which are summed in fp32 where they "
            "arrive: set zero_optimization.stage to 1 or 2, or leave communication_data_type at fp32"
        )
    reduce_size, gather_size = buckets.get("reduce_bucket_size", "auto"), buckets.get("allgather_bucket_size", "auto")
    if gather_size not in ("auto", reduce_size):
        found.append(
            f"zero_optimization.allgather_bucket_size {shown(gather_size)} differs from reduce_bucket_size "
            f"{shown(reduce_size)}: one set of buckets serves both collectives; remove it"
        )
    for name in _OPTIONAL_PACKAGES:
        if _enabled(tree, name) and find_spec(name) is None:
            found.append(
                f"{name}.enabled is true, but the package {name} is not installed: "
                f"pip install {name}, or set it to false"
            )
    if pipeline_model_parallel_size > 1:
        profilers = {"wall_clock_breakdown": bool(tree.get("wall_clock_breakdown"))}
        profilers["flops_profiler"] = _enabled(tree, "flops_profiler")
        for name, on in profilers.items():
            if on:
                found.append(
                    f"{name} crashes DeepSpeed's pipeline engine when pipeline_model_parallel_size is "
                    f"{pipeline_model_parallel_size} (more than 1): remove it; metrics.jsonl has times and FLOPs"
                )
    return found


def _walk(tree: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in tree.items():
        path = prefix + name
        if path == "hybrid" or path in _OWN_SECTIONS:
            continue
        if path in REFUSED:
            if not is_off(value):
                yield f"{path} {shown(value)} cannot work here: {REFUSED[path]}"
        elif path in SECTIONS:
            if isinstance(value, Mapping):
                yield from _walk(value, path + ".")
            else:
                yield f"{path} is {shown(value)}: it must be an object"
        elif path == "zero_optimization.stage" and value == 3:
            yield (
                "zero_optimization.stage 3 cannot work here: it gathers every parameter for each microbatch of the "
                "pipeline; use stage 2 and shard the parameters with hybrid.tensor_model_parallel_size and "
                "hybrid.pipeline_model_parallel_size"
            )
        elif path in KEYS:
            if problem := check_value(path, value, KEYS[path]):
                yield problem
        else:
            yield unknown_key(path, known_paths() | hybrid_paths())


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = tree.get(name)
    return value if isinstance(value, Mapping) else {}


def _enabled(tree: Mapping[str, Any], name: str) -> bool:
    return _section(tree, name).get("enabled") is True


def scheduler_of(ds: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Type and parameters of a sound `scheduler` section, None without one."""
    section = ds.get("scheduler")
    if section is None:
        return None
    name = canonical(section["type"], SCHEDULER_KEYS)
    assert name is not None, "only sound sections are read"
    return name, dict(section.get("params", {}))


def deepspeed_config(run: RunConfig) -> dict[str, Any]:
    """The configuration DeepSpeed's engine is made with.

    It sees stage 1 whatever the user's stage, since its pipeline engine asserts a stage below 2, and neither dtype (it
    refuses fp16 on some CPUs) nor optimizer nor scheduler: the weights are made in the run's dtype, and this package's
    optimizer shards, clips, scales and steps.
    """
    config: dict[str, Any] = {key: run.ds[key] for key in _PASSED_ON if key in run.ds}
    return {
        **config,
        "train_batch_size": run.global_batch_size,
        "train_micro_batch_size_per_gpu": run.micro_batch_size,
        "gradient_accumulation_steps": run.gradient_accumulation_steps,
        "gradient_clipping": run.gradient_clipping,
        "communication_data_type": run.communication_dtype,
        "steps_per_print": run.ds.get("steps_per_print"),
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "pipeline": {
            "pipe_partitioned": False,
            "grad_partitioned": False,
            "use_reentrant": False,
            "activation_checkpoint_interval": 0,
        },
    }
