"""The optimizer and scheduler sections."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from deepspeed.runtime import lr_schedules

from hybrid.config.optimizer import SCHEDULER_KEYS, optimizer_problems, resolve_optimizer, scheduler_problems


@pytest.mark.parametrize(
    ("section", "name", "params"),
    [
        ({}, "AdamW", {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}),
        ({"type": "adamw", "params": {"lr": 1e-3}}, "AdamW", {"lr": 1e-3, "weight_decay": 0.1}),
        ({"type": "ADAM", "params": {"weight_decay": 0.2}}, "AdamW", {"weight_decay": 0.2}),
        ({"type": "Adam"}, "AdamW", {"weight_decay": 0.0}),
        ({"type": "Adam", "params": {"adam_w_mode": False, "torch_adam": True}}, "Adam", {"adam_w_mode": False}),
        ({"type": "sgd", "params": {"momentum": 0.9}}, "SGD", {"momentum": 0.9, "nesterov": False}),
        ({"type": "lion"}, "Lion", {"betas": [0.9, 0.99]}),
    ],
)
def test_resolved(section: dict[str, Any], name: str, params: dict[str, Any]) -> None:
    assert optimizer_problems(section) == []
    resolved, complete = resolve_optimizer(section)
    assert resolved == name
    assert {key: complete[key] for key in params} == params
    assert "torch_adam" not in complete and ("adam_w_mode" in complete) == (name == "Adam")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"type": "AdamW", "params": {"lr": "auto"}}, ['lr is "auto"', "a number of at least 0"]),
        ({"type": "AdamW", "params": {"betas": [0.9]}}, ["betas is [0.9]", "two numbers"]),
        ({"type": "AdamW", "params": {"betas": [0.9, 1.0]}}, ["betas is [0.9, 1.0]"]),
        ({"type": "AdamW", "params": {"amsgrad": True}}, ["amsgrad true"]),
        ({"type": "AdamW", "params": {"max_grad_norm": 1.0}}, ["set gradient_clipping"]),
        ({"type": "SGD", "params": {"betas": [0.9, 0.9]}}, ["unknown key optimizer.params.betas"]),
        ({"type": "SGD", "params": {"nesterov": True}}, ["momentum above 0"]),
        ({"type": "AdamW", "params": [1]}, ["optimizer.params is [1]", "an object"]),
    ],
)
def test_refused(section: dict[str, Any], words: list[str]) -> None:
    (problem,) = optimizer_problems(section)
    for word in words:
        assert word in problem


@pytest.mark.parametrize("name", sorted(SCHEDULER_KEYS))
def test_scheduler_parameters_are_deepspeeds(name: str) -> None:
    signature = inspect.signature(getattr(lr_schedules, name).__init__)
    assert set(SCHEDULER_KEYS[name]) == signature.parameters.keys() - {"self", "optimizer", "last_batch_iteration"}
    required = {
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty and parameter.name not in ("self", "optimizer")
    }
    problems = scheduler_problems({"type": name})
    assert {problem.split()[0].removeprefix("scheduler.params.") for problem in problems} == required


def test_a_scheduler_needs_a_type() -> None:
    assert "OneCycle" in scheduler_problems({})[0]
