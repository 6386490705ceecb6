"""What a run goes on from: rank 0 decides, and the model must compute what it did."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.llama import small_config
from support.pool import WorkerPool
from support.runs import make_trainer, run, tree, write_tokens

from hybrid.checkpoint.compatible import _model_differences


def train_as(configs: list[dict[str, Any]]) -> tuple[str, int]:
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = make_trainer(configs[dist.get_rank()])
        trainer.train()
        return str(trainer.output), trainer.step


def test_rank_zero_decides_where_the_run_lives_and_what_it_goes_on_from(pool: WorkerPool, tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path)
    pool.run(run, 2, tree(tmp_path / "run", tokens, (1, 1, 2, 1), stop_after_steps=2))
    configs = [
        tree(tmp_path / name, tokens, (1, 1, 2, 1), stop_after_steps=1, resume=resume)
        for name, resume in (("run", "auto"), ("run-12:00:01", "none"))
    ]
    assert pool.run(train_as, 2, configs) == [(str(tmp_path / "run"), 3)] * 2
    assert not (tmp_path / "run-12:00:01").exists()


@pytest.mark.parametrize(
    ("scaling", "differ"),
    [
        (None, []),
        ({"rope_type": "linear", "factor": 2.0}, []),
        ({"rope_type": "dynamic", "factor": 2.0}, ["max_position_embeddings"]),
        ({"rope_type": "yarn", "factor": 2.0}, ["rope.original_max_position_embeddings"]),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, []),
    ],
    ids=str,
)
def test_the_longest_sequence_may_change_unless_rope_is_computed_with_it(
    scaling: dict[str, Any] | None, differ: list[str]
) -> None:
    one, other = (small_config(max_position_embeddings=n, rope_scaling=scaling) for n in (64, 128))
    assert list(_model_differences(one, other)) == [(field, 64, 128) for field in differ]
