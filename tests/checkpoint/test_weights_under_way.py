"""What reads weights right after a step waits for those that are still being gathered."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from support.pool import WorkerPool
from support.runs import run, tree, write_tokens

from hybrid.collectives import all_gather_single
from hybrid.optim import parameters


class Late:
    """A gather whose output is that of the step before until somebody waits for it."""

    def __init__(self, output: torch.Tensor, shard: torch.Tensor, group: Any) -> None:
        self._output, self._arrived = output, torch.empty_like(output)
        all_gather_single(self._arrived, shard.clone(), group=group)

    def wait(self) -> None:
        self._output.copy_(self._arrived)


def gather_late(output: torch.Tensor, shard: torch.Tensor, *, group: Any, async_op: bool = False) -> Any:
    if async_op:
        return Late(output, shard, group)
    return all_gather_single(output, shard, group=group)


def run_late(config: dict[str, Any]) -> None:
    with mock.patch.object(parameters, "all_gather_single", gather_late):
        run(config)


def written(folder: Path) -> dict[str, bytes]:
    """Every weight and state that a run left, by its file."""
    files = [*folder.glob("checkpoints/*/*.safetensors"), *folder.glob("model/*.safetensors")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_checkpoints_and_the_model_have_the_weights_of_the_last_step(pool: WorkerPool, tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path, documents=6)
    changes = {"train_steps": 2, "save_every": 1, "bf16": {"enabled": True}}
    for name, train in (("usual", run), ("late", run_late)):
        pool.run(train, 2, tree(tmp_path / name, tokens, (1, 1, 2, 1), **changes))
    usual, late = written(tmp_path / "usual"), written(tmp_path / "late")
    assert any(name.startswith("model") for name in usual) and sum("step-" in name for name in usual) >= 4
    assert usual == late
