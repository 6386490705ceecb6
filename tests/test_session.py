"""A launch that is refused: before any work, with one message, whichever ranks know the reason."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.pool import WorkerPool
from support.runs import run, tree, write_tokens

from hybrid import session, trainer
from hybrid.agreement import EXIT_REFUSED
from hybrid.config.resolve import resolve_config
from hybrid.run_folder import held


def launch(config: dict[str, Any]) -> tuple[int, str]:
    """The exit code of a rank of a launch, and what it says, inside the pool's process group."""
    with (
        patch.object(session, "init_distributed", lambda: torch.device("cpu")),
        patch.object(session, "set_up_logging", lambda rank: None),
        patch.object(session, "start_watchdog", lambda: None),
        patch.object(trainer, "build_engine", lambda *a: pytest.fail("work has begun")),
        patch.object(dist, "destroy_process_group", lambda: None),
        patch("sys.stderr") as stderr,
    ):
        code = session.run_training(resolve_config(config, dist.get_world_size()))
    return code, "".join(call.args[0] for call in stderr.write.call_args_list)


def refusal(pool: WorkerPool, config: dict[str, Any]) -> str:
    """What rank 0 says, and no other."""
    (code, said), *others = pool.run(launch, 2, config)
    assert code == EXIT_REFUSED and others == [(EXIT_REFUSED, "")]
    return str(said)


def test_the_folder_of_another_run(pool: WorkerPool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with held(folder):
        said = refusal(pool, tree(folder, write_tokens(tmp_path), (1, 1, 2, 1)))
        assert "where another run is at work" in said and f"process {os.getpid()}, " in said
        assert not (folder / "config.json").exists()


def test_what_cannot_be_gone_on_from(pool: WorkerPool, tmp_path: Path) -> None:
    tokens, folder = write_tokens(tmp_path), tmp_path / "run"
    pool.run(run, 2, tree(folder, tokens, (1, 1, 2, 1), train_steps=1))
    another = refusal(pool, tree(folder, tokens, (1, 1, 2, 1), train_steps=2, seed=9))
    assert another.count("hybrid.training.seed is 3 in the checkpoint, 9 in this run") == 1
    missing = refusal(pool, tree(folder, tokens, (1, 1, 2, 1), resume=str(tmp_path / "no")))
    assert missing.count("which does not exist") == 1
    (folder / "checkpoints" / "step-00000001" / "manifest.json").unlink()
    unsound = refusal(pool, tree(folder, tokens, (1, 1, 2, 1)))
    assert unsound.count("it has no manifest.json") == 1
    weights = str(folder / "checkpoints" / "step-00000001")
    damaged = refusal(pool, tree(tmp_path / "other", tokens, (1, 1, 2, 1), resume=weights))
    assert damaged.count("holds no checkpoint") == 1
