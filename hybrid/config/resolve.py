"""From a configuration tree to one RunConfig, or to one message with all that is wrong."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import ValidationError

from hybrid.config.batch import (
    MICRO,
    STEPS,
    TRAIN,
    Batch,
    check_without_world,
    implied_data_parallel_size,
    read_triple,
    solve_batch,
)
from hybrid.config.deepspeed import deepspeed_problems
from hybrid.config.errors import ConfigError, shown, unknown_key
from hybrid.config.layout import (
    balanced_split,
    layout_problems,
    microbatch_problems,
    schedule_problems,
    world_problems,
)
from hybrid.config.model import LlamaConfig, num_parameters, parse_hf, read_model_json
from hybrid.config.optimizer import resolve_optimizer
from hybrid.config.parallel import ParallelConfig
from hybrid.config.rampup import BatchRampup
from hybrid.config.run import Precision, RunConfig
from hybrid.config.training import HybridConfig, hybrid_paths

_MIN_BUCKET = 40_000_000
_BUCKET_PER_REPLICA = 1_000_000
"""Elements. A ring of d ranks sends bucket / d at a time, which must stay large enough to fill the network."""
_FEWEST_BUCKETS = 20
"""Of a small model: what is in its last bucket is not reduced behind the backward pass, and stage 2 holds two."""


def resolve_config(
    tree: Mapping[str, Any],
    world_size: int | None = None,
    where: str = "the configuration",
    problems: Sequence[str] = (),
) -> RunConfig:
    """The run that a configuration tree describes.

    Args:
        where: what the message calls the tree.
        problems: what is already known to be wrong, listed with the rest.

    Raises:
        ConfigError: lists everything that is wrong.
    """
    found = list(problems)
    hybrid = _read_hybrid(tree, found)
    model = _read_model(hybrid, found)
    found += world_problems(hybrid, world_size)
    if model is not None:
        found += layout_problems(hybrid, model)
    found += schedule_problems(hybrid)
    batch = _read_batch(tree, hybrid, world_size, found)
    if batch is not None:
        found += _rampup_problems(hybrid, batch) or microbatch_problems(hybrid, batch)
    found += deepspeed_problems(tree, hybrid.pipeline_model_parallel_size)
    if found:
        raise ConfigError(list(dict.fromkeys(found)), where)
    assert model is not None and batch is not None, "without a model or a batch there is a problem"
    return _resolved(tree, hybrid, model, batch)


def _read_hybrid(tree: Mapping[str, Any], problems: list[str]) -> HybridConfig:
    """The `hybrid` section, with defaults in place of what is wrong so that the other checks can go on."""
    section = copy.deepcopy(tree.get("hybrid", {}))
    if not isinstance(section, dict):
        problems.append(f"hybrid is {shown(section)}: it must be an object")
        section = {}
    _merge_deepspeed_keys(tree, section, problems)
    while True:
        try:
            return HybridConfig.model_validate(section)
        except ValidationError as error:
            faults: dict[tuple[str, ...], list[str]] = {}
            missing: dict[tuple[str, ...], list[str]] = {}
            for detail in error.errors():
                path = _path_in(section, detail["loc"])
                if detail["type"] == "missing":
                    missing.setdefault(path, []).append(str(detail["loc"][-1]))
                    continue
                unknown = detail["type"] == "extra_forbidden"
                faults.setdefault(path, []).append("" if unknown else _rule(detail["type"], detail["msg"]))
            for path, names in missing.items():
                faults.setdefault(path, []).append(f"an object with {' and '.join(names)} too")
            for path, rules in faults.items():
                value = _remove(section, path)
                dotted = ".".join(["hybrid", *path])
                if rules == [""]:
                    problems.append(unknown_key(dotted, hybrid_paths()))
                else:
                    problems.append(f"{dotted} is {shown(value)}: it must be {' or '.join(dict.fromkeys(rules))}")


def _rule(kind: str, message: str) -> str:
    """A fault's rule in the words of JSON."""
    if kind in ("model_type", "dict_type"):
        return "an object"
    return message.removeprefix("Input should be ").replace("valid list", "list").replace("valid string", "string")


def _path_in(section: Mapping[str, Any], loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """The keys of `section` that an error's location leads through; pydantic adds names of types and indices."""
    path: list[str] = []
    value: Any = section
    for part in loc:
        if not isinstance(value, Mapping) or part not in value:
            break
        value = value[part]
        path.append(str(part))
    return tuple(path)


def _remove(section: dict[str, Any], path: tuple[str, ...]) -> Any:
    """Take the value at `path` out of nested dicts."""
    for name in path[:-1]:
        section = section[name]
    return section.pop(path[-1])


def _merge_deepspeed_keys(tree: Mapping[str, Any], section: dict[str, Any], problems: list[str]) -> None:
    """Let DeepSpeed's own keys stand for ours where both mean the same, unless they contradict each other."""
    zero = tree.get("zero_optimization")
    overlap = zero.get("overlap_comm") if isinstance(zero, Mapping) else None
    optimizer = section.setdefault("optimizer", {})
    if isinstance(overlap, bool) and isinstance(optimizer, dict):
        ours = optimizer.setdefault("overlap", overlap)
        if ours != overlap:
            problems.append(
                f"zero_optimization.overlap_comm is {shown(overlap)} but hybrid.optimizer.overlap is {shown(ours)}, "
                "and they mean the same: remove one"
            )
    training = section.setdefault("training", {})
    if not isinstance(training, dict):
        return
    schedule = training.get("lr_schedule")
    if tree.get("scheduler") is None:
        if "lr_schedule" in training and schedule is None:
            problems.append(
                "hybrid.training.lr_schedule is null and there is no scheduler section: name a schedule, for example "
                '{"type": "constant"}, or leave the key out'
            )
            del training["lr_schedule"]
        return
    if schedule is not None:
        problems.append(
            f"scheduler and hybrid.training.lr_schedule {shown(schedule)} both set the learning rate: remove one"
        )
    training["lr_schedule"] = None


def _read_model(hybrid: HybridConfig, problems: list[str]) -> LlamaConfig | None:
    """The architecture, as far as it can be read."""
    try:
        parsed = parse_hf(read_model_json(hybrid.model))
    except ConfigError as error:
        problems += error.violations
        return None
    problems += [f"hybrid.model: {problem}" for problem in parsed.problems]
    parsed.log_warnings()
    return parsed.config


def _read_batch(
    tree: Mapping[str, Any], hybrid: HybridConfig, world_size: int | None, problems: list[str]
) -> Batch | None:
    """The batch triple, solved with the data-parallel size of the grid."""
    given = read_triple(tree, problems)
    if given is None:
        return None
    tp, pp = hybrid.tensor_model_parallel_size, hybrid.pipeline_model_parallel_size
    if world_size is None:
        return solve_batch(given, implied_data_parallel_size(given), "no world size is given", problems)
    if world_size % (tp * pp):
        check_without_world(given, problems)
        return None
    grid = f"world size {world_size} / (tensor {tp} x pipeline {pp})"
    return solve_batch(given, world_size // (tp * pp), grid, problems)


def _rampup_problems(hybrid: HybridConfig, batch: Batch) -> list[str]:
    """Whether the sizes of the ramp-up arrive at the global batch, and the grid can cut them."""
    rampup = hybrid.training.batch_rampup
    if rampup is None:
        return []
    try:
        sizes = BatchRampup(final=batch.global_size, **rampup.model_dump())
        sizes.check(batch.micro_size, batch.data_parallel_size)
    except ValueError as error:
        return [f"hybrid.training.batch_rampup: {error}"]
    return []


def _precision(tree: Mapping[str, Any]) -> Precision:
    if tree.get("bf16", {}).get("enabled"):
        return "bf16"
    return "fp16" if tree.get("fp16", {}).get("enabled") else "fp32"


def _resolved(tree: Mapping[str, Any], hybrid: HybridConfig, model: LlamaConfig, batch: Batch) -> RunConfig:
    """Fill in the defaults of a sound tree."""
    tp, pp = hybrid.tensor_model_parallel_size, hybrid.pipeline_model_parallel_size
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        data_parallel_size=batch.data_parallel_size,
        sequence_parallel=hybrid.sequence_parallel,
    )
    split = hybrid.pipeline_split or balanced_split(model, hybrid.num_stages, hybrid.data.seq_length)
    zero = tree.get("zero_optimization", {})
    stage: Literal[0, 1, 2] = zero.get("stage", 0)
    bucket = zero.get("reduce_bucket_size", "auto")
    if bucket == "auto":
        bucket = max(_MIN_BUCKET, _BUCKET_PER_REPLICA * batch.data_parallel_size)
        bucket = min(bucket, -(-num_parameters(model) // (tp * pp * _FEWEST_BUCKETS)))
    optimizer_type, optimizer_params = resolve_optimizer(tree.get("optimizer", {}))
    clipping = float(tree.get("gradient_clipping", 1.0))
    communication_dtype: Precision = tree.get("communication_data_type", "fp32")
    ds = {
        **copy.deepcopy({key: value for key, value in tree.items() if key != "hybrid"}),
        TRAIN: batch.global_size,
        MICRO: batch.micro_size,
        STEPS: batch.accumulation_steps,
        "gradient_clipping": clipping,
        "communication_data_type": communication_dtype,
        "zero_optimization": {**_without_auto(zero), "stage": stage, "reduce_bucket_size": int(bucket)},
        "optimizer": {"type": optimizer_type, "params": optimizer_params},
    }
    return RunConfig(
        ds=ds,
        hybrid=hybrid,
        model=model,
        parallel=parallel,
        precision=_precision(tree),
        zero_stage=stage,
        micro_batch_size=batch.micro_size,
        gradient_accumulation_steps=batch.accumulation_steps,
        global_batch_size=batch.global_size,
        reduce_bucket_size=int(bucket),
        communication_dtype=communication_dtype,
        gradient_clipping=clipping,
        optimizer_type=optimizer_type,
        optimizer_params=optimizer_params,
        layers_per_stage=tuple(split),
    )


def _without_auto(zero: Mapping[str, Any]) -> dict[str, Any]:
    """The section without what resolves to the size of the reduction's buckets."""
    return {key: value for key, value in zero.items() if key != "allgather_bucket_size"}
