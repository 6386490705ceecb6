"""The background writer: complete or absent, whatever fails and whenever it is killed."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.saving import COLUMNS, RANKS, ROWS, Saver

from hybrid.checkpoint import directory, writer
from hybrid.checkpoint.select import choose
from hybrid.convert.sources import open_checkpoint

KILLS = 100


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def content(path: Path) -> set[float]:
    """The different values in a checkpoint's tensor."""
    tensor = open_checkpoint(path).store.read("embedding")
    assert tensor.shape == (RANKS * ROWS, COLUMNS)
    return set(tensor.unique().tolist())


def test_what_is_written_is_read_by_torch_too(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    Saver(tmp_path).save(7)
    path = choose("auto", tmp_path)
    assert path == tmp_path / "step-00000007" and content(path) == {7.0}
    state = {"embedding": torch.zeros(RANKS * ROWS, COLUMNS)}
    load(state, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert torch.equal(state["embedding"], torch.full_like(state["embedding"], 7.0))
    assert not list(path.glob("*.done")) and not list(path.glob("*.pt"))


def test_host_memory_is_bounded_by_two_copies(tmp_path: Path) -> None:
    saver = Saver(tmp_path)
    copy = ROWS * COLUMNS * 4
    saver.save(1)
    saver.save(2)
    assert saver.writers[0].buffers.nbytes == copy  # the second buffer was not needed
    for step in range(3, 9):
        saver.submit(step)
    assert [w.buffers.nbytes for w in saver.writers] <= [2 * copy] * RANKS
    saver.save(9)
    assert list(directory.steps(tmp_path)) == list(range(9, 0, -1))


def test_old_ones_are_pruned_after_the_new_one_is_complete(tmp_path: Path) -> None:
    saver = Saver(tmp_path, keep_last=2)
    for step in range(1, 6):
        saver.save(step)
    assert list(directory.steps(tmp_path)) == [5, 4]


def test_a_failed_rank_leaves_nothing_and_the_next_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Saver(tmp_path)
    saver.save(1)
    write = os.pwrite

    def full(fd: int, data: memoryview, position: int) -> int:
        if "model-1-0" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data, position)

    monkeypatch.setattr(os, "pwrite", full)
    jobs = saver.submit(2)
    assert jobs[1].finished.wait(30)
    assert jobs[1].error is not None and "No space left" in jobs[1].error
    assert not jobs[0].finished.is_set()  # rank 0 waits for the other's files, until it is told
    for job in jobs:
        job.give_up()
    assert list((tmp_path / ".step-00000002.writing").iterdir()) == []
    assert choose("auto", tmp_path) == tmp_path / "step-00000001"
    monkeypatch.undo()
    saver.save(3)
    assert choose("auto", tmp_path) == tmp_path / "step-00000003"


def test_a_rank_that_never_writes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "COMMIT_TIMEOUT", 0.2)
    saver = Saver(tmp_path)
    monkeypatch.setattr(saver.writers[1], "submit", lambda job: None)
    jobs = saver.submit(4)
    assert jobs[0].finished.wait(30) and "rank-1.done" in str(jobs[0].error)


def save_for_ever(root: Path) -> None:
    saver = Saver(root, keep_last=2)
    known = directory.steps(root)
    step = max(known, default=0)
    directory.clean(root)
    while True:
        step += 1
        saver.save(step)


def test_random_kills_never_corrupt_or_lose_a_checkpoint(tmp_path: Path) -> None:
    """Kill the whole saving process, all ranks, at random times; what was complete before must stay loadable."""
    root, generator, newest, interrupted = tmp_path / "checkpoints", random.Random(20), 0, 0
    for kill in range(KILLS):
        child = os.fork()
        if child == 0:
            try:
                save_for_ever(root)
            finally:
                os._exit(1)
        time.sleep(generator.uniform(0.005, 0.12))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        interrupted += bool(directory.leftovers(root))
        path = choose("auto", root)
        step = 0 if path is None else directory.step_of(path) or 0
        assert step >= newest, f"kill {kill}: step {newest} was complete, now {step} is the newest"
        if path is not None:
            assert content(path) == {float(step)}
            # It is the newest of all, and the one before it, which retention keeps, is sound as well.
            assert list(directory.steps(root))[0] == step
            assert all(content(other) == {float(s)} for s, other in list(directory.steps(root).items())[:2])
        newest = step
    assert newest > KILLS / 2 and interrupted > KILLS / 4


@pytest.mark.parametrize("moment", ["first file", "before the manifest", "before the rename", "before the pointer"])
def test_killed_at_every_stage(tmp_path: Path, moment: str) -> None:
    """The stages of a save: after each the checkpoint before it, or the new one, is what a run goes on from."""
    saver = Saver(tmp_path)
    saver.save(1)
    stop = {
        "first file": (writer.BackgroundWriter, "_complete"),
        "before the manifest": (writer, "commit"),
        "before the rename": (Path, "rename"),
        "before the pointer": (directory, "point_to"),
    }[moment]
    child = os.fork()
    if child == 0:
        if moment == "before the rename":
            rename = Path.rename

            def killed(self: Path, target: Path) -> Path:
                if self.name.endswith(".writing") and self.is_dir():
                    os.kill(os.getpid(), signal.SIGKILL)
                return rename(self, target)

            Path.rename = killed  # type: ignore[method-assign, assignment]
        else:
            setattr(*stop, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
        Saver(tmp_path).save(2)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    path = choose("auto", tmp_path)
    expected = 2 if moment == "before the pointer" else 1
    assert path is not None and directory.step_of(path) == expected and content(path) == {float(expected)}
