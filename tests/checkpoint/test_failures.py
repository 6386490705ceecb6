"""A checkpoint that cannot be written: the run goes on, says so, and harms none of those before."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.pool import WorkerPool
from support.runs import make_trainer, tree, write_tokens

from hybrid.checkpoint.directory import steps
from hybrid.convert.errors import CheckpointError

RANKS = 2
ROOT = Path(__file__).parents[2]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB; a checkpoint of the small model takes 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no small file system can be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def train(
    config: dict[str, Any], fail_from: int | None = None, failing_rank: int = 1, blocked: bool = False
) -> tuple[str, str, list[int]]:
    """(outcome, log, steps that are complete) of this rank.

    From a step on, the writes of a rank may be made to fail; `blocked` lets no folder for checkpoints be made.
    """
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("hybrid").addHandler(handler)
    write = os.pwrite
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = make_trainer(config)

        if blocked and trainer.grid.rank == 0:
            trainer.checkpointer.root.write_text("in the way")

        def full(fd: int, data: memoryview, position: int) -> int:
            if fail_from is not None and trainer.step >= fail_from and trainer.grid.rank == failing_rank:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(fd, data, position)

        os.pwrite = full
        try:
            result = str(trainer.train())
        except CheckpointError as error:
            result = str(error)
        finally:
            os.pwrite = write
            logging.getLogger("hybrid").removeHandler(handler)
    return f"{result} at {trainer.step}", log.getvalue(), sorted(steps(trainer.checkpointer.root))


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_the_run_stops_after_some_failures_on_every_rank(
    pool: WorkerPool, tmp_path: Path, asynchronous: bool, failing_rank: int
) -> None:
    tokens = write_tokens(tmp_path)
    config = tree(
        tmp_path / "run", tokens, (1, 1, 2, 2), save_every=1, train_steps=50,
        checkpoint={"async": asynchronous, "max_failures": 2},
    )  # fmt: skip
    (result, log, complete), (other, _, _) = pool.run(train, RANKS, config, 3, failing_rank)
    assert result == other
    assert f"rank {failing_rank}: " in result and "No space left on device" in result
    # More than one may fail before the first is reported.
    assert re.search(r"\([23] in a row, hybrid.checkpoint.max_failures 2\)", result)
    assert int(result.split()[-1]) < 9  # reported at the next step, or soon after where the write goes on in between
    assert "the checkpoint of step 3 could not be written" in log + result
    assert complete == [1, 2]
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def test_the_last_one_failing_is_an_error(pool: WorkerPool, tmp_path: Path) -> None:
    config = tree(tmp_path / "run", write_tokens(tmp_path), (2, 1, 1, 2), save_every=2, train_steps=4)
    (result, _, complete), (other, _, _) = pool.run(train, RANKS, config, 4)
    assert result == other and "without the checkpoint of step 4" in result and complete == [2]


def test_a_full_disk(pool: WorkerPool, tmp_path: Path, small_disk: Path) -> None:
    """A few checkpoints fit; more do not, until retention or the user makes room."""
    tokens = write_tokens(tmp_path)
    config = tree(
        small_disk / "run", tokens, (1, 1, 2, 2), save_every=1, train_steps=20, stop_after_steps=7,
        checkpoint={"max_failures": 9},
    )  # fmt: skip
    (result, log, complete), (other, _, _) = pool.run(train, RANKS, config)
    assert result == other
    assert "could not be written" in log and "No space left on device" in log
    assert complete and max(complete) < 7
    assert len((small_disk / "run" / "metrics.jsonl").read_text().splitlines()) == 7
    for step in complete[:-1]:
        shutil.rmtree(small_disk / "run" / "checkpoints" / f"step-{step:08d}")
    config["hybrid"]["checkpoint"] = {"keep_last": 1}
    (_, log, later), _ = pool.run(train, RANKS, config)
    assert "could not" not in log and later == [complete[-1] + 7]


def test_a_folder_that_cannot_be_written_to(pool: WorkerPool, tmp_path: Path) -> None:
    """A file lies where the folder should be: unlike a read-only folder, that stops a superuser too."""
    tokens = write_tokens(tmp_path)
    config = tree(tmp_path / "run", tokens, (1, 1, 2, 2), save_every=1, train_steps=9, checkpoint={"max_failures": 3})
    (result, log, _), (other, _, _) = pool.run(train, RANKS, config, blocked=True)
    assert result == other and "rank 0: " in result and "3 in a row" in result and result.endswith(" at 3")
    assert log.count("the run goes on") == 2


def test_a_run_that_cannot_save_ends_with_one_message(tmp_path: Path, small_disk: Path) -> None:
    """From the command line: no traceback of every rank, and what to do."""
    config = tree(small_disk / "run", write_tokens(tmp_path), (2, 1, 1, 2), train_steps=2)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (small_disk / "others").write_bytes(bytes(3_400_000))
    command = [sys.executable, "launch/pretrain.py", "--ds_config", str(tmp_path / "config.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr and "No space left on device" in done.stderr
    assert done.stderr.count("the run ends without the checkpoint of step 2") == 1
    assert "the same command goes on from the newest complete one" in done.stderr
