"""The worker pool that runs the distributed tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from support.pool import WorkerError, WorkerPool


@dataclass
class Answer:
    rank: int
    tensor: torch.Tensor


def add_ranks(base: float, *, scale: float = 1.0) -> Answer:
    value = torch.full((3,), base + dist.get_rank() * scale)
    dist.all_reduce(value)
    return Answer(dist.get_rank(), value)


def environment() -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "HF_HUB_OFFLINE")
    return {name: os.environ[name] for name in names}


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"bad value on {rank}")
    dist.barrier()


def fail_everywhere() -> None:
    raise KeyError(dist.get_rank())


class Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("two arguments, one of them lost")


def raise_unpicklable() -> None:
    raise Unpicklable(1, 2)


def hang() -> None:
    time.sleep(600)


def die() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def view_of_a_parameter() -> tuple[torch.Tensor, torch.nn.Parameter]:
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3) + 10 * dist.get_rank())
    return parameter.detach()[:, 1:], parameter


def draw_and_disturb() -> float:
    drawn = float(torch.rand(()))
    torch.set_default_dtype(torch.float64)
    os.environ["LEFT_BEHIND"] = "yes"
    return drawn


def left_behind() -> tuple[str | None, torch.dtype]:
    return os.environ.get("LEFT_BEHIND"), torch.get_default_dtype()


def deepspeed_world() -> tuple[int, int, bool]:
    import deepspeed
    import deepspeed.comm
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

    deepspeed.init_distributed("gloo")
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=dist.get_world_size(), num_dp=1)
    grid = PipelineParallelGrid(topology=topology)
    return deepspeed.comm.get_world_size(), grid.get_slice_parallel_world_size(), "deepspeed_shm_comm" in sys.modules


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_by_rank(pool: WorkerPool, world_size: int) -> None:
    answers = pool.run(add_ranks, world_size, 1.0, scale=2.0)
    expected = sum(1.0 + 2.0 * rank for rank in range(world_size))
    assert [answer.rank for answer in answers] == list(range(world_size))
    assert all(type(answer) is Answer and answer.tensor.tolist() == [expected] * 3 for answer in answers)


def test_the_environment_is_a_launchers(pool: WorkerPool) -> None:
    for rank, found in enumerate(pool.run(environment, 2)):
        assert found == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }


def test_workers_are_reused_and_calls_leave_nothing_behind(pool: WorkerPool) -> None:
    first = pool.run(draw_and_disturb, 2)
    before = pool.pids
    assert pool.run(left_behind, 2) == [(None, torch.float32)] * 2
    assert pool.run(draw_and_disturb, 2) == first
    assert pool.pids == before


def test_deepspeed_sees_each_calls_world(pool: WorkerPool) -> None:
    for world_size in (2, 4, 1, 2):
        assert pool.run(deepspeed_world, world_size) == [(world_size, world_size, False)] * world_size


def test_tensors_travel_by_value(pool: WorkerPool) -> None:
    view, parameter = pool.run(view_of_a_parameter, 2)[1]
    assert view.tolist() == [[11.0, 12.0], [14.0, 15.0]]
    assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad


def test_an_exception_names_its_rank_and_does_not_wait_for_a_hanging_peer(pool: WorkerPool) -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="bad value on 1") as caught:
        pool.run(fail_on, 2, 1)
    assert time.monotonic() - start < 10
    note = "\n".join(caught.value.__notes__)
    assert "raised by rank 1" in note and "in fail_on" in note
    assert len(pool.run(environment, 2)) == 2


def test_exceptions_on_all_ranks_keep_the_workers(pool: WorkerPool) -> None:
    pool.run(environment, 2)
    before = pool.pids
    with pytest.raises(KeyError) as caught:
        pool.run(fail_everywhere, 2)
    assert "KeyError" in "\n".join(caught.value.__notes__)
    assert pool.pids == before


def test_an_exception_that_cannot_be_pickled_is_described(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="two arguments, one of them lost"):
        pool.run(raise_unpicklable, 1)


def test_a_timeout_shows_the_stacks_and_the_next_call_works(pool: WorkerPool) -> None:
    with pytest.raises(TimeoutError, match=r"(?s)ranks \[0, 1\] took longer than 2 s.*in hang"):
        pool.run(hang, 2, timeout=2)
    assert len(pool.run(environment, 2)) == 2


def test_a_dead_rank_is_reported(pool: WorkerPool) -> None:
    with pytest.raises((WorkerError, RuntimeError)) as caught:
        pool.run(die, 2)
    assert "died with exit code" in str(caught.value) + "\n".join(caught.value.__notes__)


def test_a_local_function_and_too_many_ranks_are_refused(pool: WorkerPool) -> None:
    with pytest.raises(ValueError, match="module level"):
        pool.run(lambda: None, 1)
    with pytest.raises(ValueError, match="world of 5 ranks"):
        pool.run(environment, 5)


def test_workers_die_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
        import time
        from support.pool import WorkerPool

        def wait_long():
            time.sleep(600)

        def nothing():
            pass

        if __name__ == "__main__":
            pool = WorkerPool()
            pool.run(nothing, 2)
            print(*pool.pids, flush=True)
            pool.run(wait_long, 2)
        """)
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2 and all(psutil.pid_exists(pid) for pid in workers)
    descendants = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs(descendants, timeout=5)
    assert not alive
