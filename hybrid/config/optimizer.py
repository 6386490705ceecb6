"""DeepSpeed's `optimizer` and `scheduler` sections: the types that work on shards, their parameters and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid.config.deepspeed_keys import BETAS, BOOL, COUNT, COUNT_OR_ZERO, NOT_NEGATIVE, NUMBER, Key, Kind
from hybrid.config.errors import shown, unknown_key

_FRACTION = Kind("a number in [0, 1)", lambda v: NOT_NEGATIVE.accepts(v) and v < 1)
_WARMUP = Kind("log or linear", lambda v: v in ("log", "linear"))

_ADAM_KEYS = {
    "lr": Key(NOT_NEGATIVE),
    "betas": Key(BETAS),
    "eps": Key(NOT_NEGATIVE),
    "weight_decay": Key(NOT_NEGATIVE),
    "adam_w_mode": Key(BOOL),
    "torch_adam": Key(BOOL),
    "bias_correction": Key(BOOL, (True,), "Adam's moments are always corrected; remove it"),
    "amsgrad": Key(BOOL, (False,), "the AMSGrad variant is not implemented; remove it"),
}

OPTIMIZER_KEYS: dict[str, dict[str, Key]] = {
    "Adam": _ADAM_KEYS,
    "AdamW": {key: rule for key, rule in _ADAM_KEYS.items() if key != "adam_w_mode"},
    "SGD": {
        "lr": Key(NOT_NEGATIVE),
        "momentum": Key(_FRACTION),
        "dampening": Key(_FRACTION),
        "nesterov": Key(BOOL),
        "weight_decay": Key(NOT_NEGATIVE),
    },
    "Lion": {"lr": Key(NOT_NEGATIVE), "betas": Key(BETAS), "weight_decay": Key(NOT_NEGATIVE)},
}
"""The parameters of each supported type."""

OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0},
    "AdamW": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    "SGD": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0},
    "Lion": {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.0},
}
"""LLaMA's settings for AdamW (Touvron et al. 2023, section 2.3), the authors' for the rest."""

DEFAULT_OPTIMIZER = "AdamW"

_NOT_ELEMENTWISE = frozenset("muon lamb fusedlamb onebitadam onebitlamb zerooneadam muadam muadamw musgd".split())

_MIN, _MAX = "warmup_min_lr", "warmup_max_lr"
_WARMUP_KEYS = {"warmup_num_steps": Key(COUNT), "warmup_type": Key(_WARMUP)}

SCHEDULER_KEYS: dict[str, dict[str, Key]] = {
    "LRRangeTest": {
        "lr_range_test_min_lr": Key(NOT_NEGATIVE),
        "lr_range_test_step_size": Key(COUNT),
        "lr_range_test_step_rate": Key(NOT_NEGATIVE),
        "lr_range_test_staircase": Key(BOOL),
    },
    "OneCycle": {
        "cycle_min_lr": Key(NOT_NEGATIVE),
        "cycle_max_lr": Key(NOT_NEGATIVE),
        "decay_lr_rate": Key(NUMBER),
        "cycle_first_step_size": Key(COUNT),
        "cycle_second_step_size": Key(COUNT),
        "cycle_first_stair_count": Key(COUNT_OR_ZERO),
        "cycle_second_stair_count": Key(COUNT_OR_ZERO),
        "decay_step_size": Key(COUNT_OR_ZERO),
        "cycle_momentum": Key(BOOL),
        "cycle_min_mom": Key(_FRACTION),
        "cycle_max_mom": Key(_FRACTION),
        "decay_mom_rate": Key(NUMBER),
    },
    "WarmupLR": {_MIN: Key(NOT_NEGATIVE), _MAX: Key(NOT_NEGATIVE), **_WARMUP_KEYS},
    "WarmupDecayLR": {
        "total_num_steps": Key(COUNT),
        _MIN: Key(NOT_NEGATIVE),
        _MAX: Key(NOT_NEGATIVE),
        **_WARMUP_KEYS,
    },
    "WarmupCosineLR": {
        "total_num_steps": Key(COUNT),
        "warmup_min_ratio": Key(_FRACTION),
        "cos_min_ratio": Key(_FRACTION),
        **_WARMUP_KEYS,
    },
}
"""DeepSpeed's learning-rate schedules and their parameters."""

_REQUIRED = {
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
}


def check_value(path: str, value: object, key: Key) -> str | None:
    """The violation of a value, if it is one."""
    if not key.kind.accepts(value):
        return f"{path} is {shown(value)}: it must be {key.kind.name}"
    if key.only and value not in key.only:
        return f"{path} {shown(value)} cannot work here: {key.because}"
    return None


def _check_params(section: str, params: object, keys: Mapping[str, Key]) -> list[str]:
    if not isinstance(params, Mapping):
        return [f"{section}.params is {shown(params)}: it must be an object"]
    known = [f"{section}.params.{name}" for name in keys]
    found = []
    for name, value in params.items():
        path = f"{section}.params.{name}"
        if name == "max_grad_norm":
            found.append(f"{path} is not an optimizer parameter: set gradient_clipping instead")
        elif name not in keys:
            found.append(unknown_key(path, known))
        elif problem := check_value(path, value, keys[name]):
            found.append(problem)
    return found


def optimizer_problems(section: Mapping[str, Any]) -> list[str]:
    """What is wrong with the type and parameters of an `optimizer` section."""
    kind = section.get("type", DEFAULT_OPTIMIZER)
    if not isinstance(kind, str):
        return []
    name = canonical(kind, OPTIMIZER_KEYS)
    if name is None:
        supported = ", ".join(OPTIMIZER_KEYS)
        reason = f"the supported types are {supported}"
        if kind.lower() in _NOT_ELEMENTWISE:
            reason = (
                "its update needs the norm or the whole of each matrix, while every rank holds a shard of the flat "
                f"state, so only elementwise updates work: {supported}"
            )
        return [f"optimizer.type {kind!r} is not supported: {reason}"]
    found = _check_params("optimizer", section.get("params", {}), OPTIMIZER_KEYS[name])
    params = section.get("params", {})
    if name == "SGD" and not found and params.get("nesterov"):
        if not params.get("momentum") or params.get("dampening"):
            found.append("optimizer.params.nesterov true needs a momentum above 0 and dampening 0")
    return found


def resolve_optimizer(section: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Type and complete parameters of a sound `optimizer` section.

    As in DeepSpeed, `Adam` decouples its weight decay unless `adam_w_mode` is false, so that it is AdamW.
    """
    name = canonical(section.get("type", DEFAULT_OPTIMIZER), OPTIMIZER_KEYS)
    assert name is not None, "only sound sections are resolved"
    params = {**OPTIMIZER_DEFAULTS[name], **section.get("params", {})}
    if name == "Adam" and params.setdefault("adam_w_mode", True):
        name = "AdamW"
        del params["adam_w_mode"]
    for without_effect in ("torch_adam", "bias_correction", "amsgrad"):
        params.pop(without_effect, None)
    return name, params


def scheduler_problems(section: Mapping[str, Any]) -> list[str]:
    """What is wrong with the type and parameters of a `scheduler` section."""
    kind = section.get("type")
    if kind is None:
        return [f"scheduler has no type: {', '.join(SCHEDULER_KEYS)} are supported"]
    name = canonical(kind, SCHEDULER_KEYS) if isinstance(kind, str) else None
    if name is None:
        return [f"scheduler.type {shown(kind)} is not supported: {', '.join(SCHEDULER_KEYS)} are"]
    params = section.get("params", {})
    found = _check_params("scheduler", params, SCHEDULER_KEYS[name])
    for required in _REQUIRED.get(name, ()):
        if isinstance(params, Mapping) and required not in params:
            found.append(f"scheduler.params.{required} is missing: {name} needs it")
    return found


def canonical(name: str, known: Mapping[str, object]) -> str | None:
    """The spelling in `known` of a name in any case."""
    return next((spelling for spelling in known if spelling.lower() == name.lower()), None)
