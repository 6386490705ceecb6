"""Ranks that were started with different arguments do what rank 0 was told."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support.pool import WorkerPool
from support.runs import make_trainer, run, tree, write_tokens


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
