"""The `hybrid` section: types, bounds, and that every field says what it means."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from typing import Any

import pytest
from pydantic import ValidationError

from hybrid.config import model, rope, run, training
from hybrid.config.training import HybridConfig, hybrid_paths


def test_everything_has_a_default() -> None:
    config = HybridConfig()
    assert (config.tensor_model_parallel_size, config.pipeline_model_parallel_size) == (1, 1)
    assert (config.model, config.data.source, config.recompute.granularity) == ("demo", "demo", "none")


def test_frozen() -> None:
    with pytest.raises(ValidationError):
        HybridConfig().data.seq_length = 4


def test_a_bare_string_is_the_granularity() -> None:
    assert HybridConfig.model_validate({"recompute": "selective"}).recompute.granularity == "selective"


@pytest.mark.parametrize(
    "section",
    [
        {"tensor_model_parallel_size": 0},
        {"tensor_model_parallel_size": "2"},
        {"tensor_model_parallel_size": True},
        {"tensor_model_parallel_size": 2.0},
        {"sequence_parallel": 1},
        {"pipeline_split": [1, "2"]},
        {"recompute": "some"},
        {"model": 7},
        {"data": {"source": [1]}},
        {"data": {"eval_fraction": 1.0}},
        {"data": {"eval_fraction": 0.6, "test_fraction": 0.4}},
        {"training": {"lr_schedule": {"type": "cos"}}},
        {"training": {"seed": -1}},
        {"training": {"output_dir": ""}},
        {"training": {"max_wall_time": float("inf")}},
        {"optimizer": {"memory_gib": float("inf")}},
        {"optimizer": {"gradient_sharding": "never"}},
        {"training": {"steps": 5}},
    ],
)
def test_wrong_types_bounds_and_names(section: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        HybridConfig.model_validate(section)


@pytest.mark.parametrize("module", [training, model, rope, run], ids=lambda module: str(module.__name__))
def test_every_field_is_documented(module: Any) -> None:
    for statement in ast.parse(inspect.getsource(module)).body:
        if isinstance(statement, ast.ClassDef):
            for field, following in pairwise([*statement.body, ast.Pass()]):
                if isinstance(field, ast.AnnAssign):
                    assert isinstance(following, ast.Expr), f"{statement.name}: {ast.unparse(field)}"


def test_paths() -> None:
    paths = hybrid_paths()
    assert {
        "hybrid.data",
        "hybrid.data.source",
        "hybrid.training.lr_schedule.type",
        "hybrid.optimizer.overlap",
    } <= paths
