"""Signals, kills, limits and dead ranks, on real launches."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import tree, write_tokens

from hybrid.checkpoint.directory import leftovers, steps
from hybrid.convert.sources import open_checkpoint

ROOT = Path(__file__).parents[2]
SLOW_KILLS = 100

ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def launch(folder: Path, config: dict[str, Any], *extra: str, **environment: str) -> subprocess.Popen[str]:
    """The training command on `config`."""
    folder.mkdir(exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    command = [sys.executable, str(ROOT / "launch" / "pretrain.py"), "--ds_config", str(path), *extra]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    assert process.stdout is not None
    lines = ""
    for line in process.stdout:
        lines += line
        if re.search(pattern, line):
            return lines
    raise AssertionError(f"{pattern!r} never came:\n{lines}")


def long_run(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return tree(tmp_path / "run", write_tokens(tmp_path), (2, 1, 1, 2), train_steps=100_000, **changes)


def test_a_signal_saves_and_the_next_launch_goes_on(tmp_path: Path) -> None:
    config, last = long_run(tmp_path), 0
    for number in (signal.SIGTERM, signal.SIGUSR1):
        process = launch(tmp_path / "launch", config)
        begun = read_until(process, rf"step {last + 3}/")
        assert last == 0 or "going on from" in begun
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 75, output
        last = max(steps(tmp_path / "run" / "checkpoints"))
        assert f"{number.name} was received: the run is saved at step {last} of 100000" in output
    lines = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, last + 1))


def test_wall_time(tmp_path: Path) -> None:
    process = launch(tmp_path / "launch", long_run(tmp_path), "--max_wall_time", "0:02")
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 75 and "max_wall_time" in output, output
    assert list(steps(tmp_path / "run" / "checkpoints"))


def test_a_killed_rank_ends_the_others_and_is_named(tmp_path: Path) -> None:
    """Without the launcher's help: two launchers on loopback, as on two nodes, one rank each."""
    config = long_run(tmp_path)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    ranks = [
        launch(tmp_path / f"launch{rank}", config, RANK=str(rank), MASTER_PORT=str(port), **common) for rank in range(2)
    ]
    read_until(ranks[0], r"step 2/")
    ranks[1].kill()
    began = time.monotonic()
    output, _ = ranks[0].communicate(timeout=40)
    ranks[1].communicate(timeout=5)
    assert ranks[0].returncode not in (0, 75)
    assert "rank 1 is gone: its process has died" in output, output
    assert time.monotonic() - began < 20


def test_two_nodes_with_torchrun(tmp_path: Path) -> None:
    """Two launchers on loopback, as on two nodes; a resume on one node goes on with the same data."""
    config = tree(tmp_path / "run", write_tokens(tmp_path), (1, 1, 2, 2), train_steps=6, stop_after_steps=3)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", f"--node_rank={node}",
             "--master_addr=127.0.0.1", f"--master_port={port}", str(ROOT / "launch" / "pretrain.py"),
             "--ds_config", str(path)],
            cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    outputs = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    process = launch(tmp_path / "launch", config)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "going on from" in output, output
    lines = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [1, 2, 3, 4, 5, 6]


def rank_process(config: dict[str, Any], rank: int, world_size: int, port: int) -> None:
    """A rank of a real run, in a process that has the libraries loaded."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    from hybrid.config.resolve import resolve_config
    from hybrid.session import run_training

    sys.exit(run_training(resolve_config(config, world_size)))


@pytest.fixture(scope="module")
def start_ranks() -> Callable[[dict[str, Any], int], list[BaseProcess]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "deepspeed", "hybrid.trainer"])

    def start(config: dict[str, Any], world_size: int) -> list[BaseProcess]:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        ranks = [
            context.Process(target=rank_process, args=(config, rank, world_size, port)) for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        return list(ranks)

    return start


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    root = folder / "checkpoints"
    store = open_checkpoint(root / (root / "latest").read_text().strip()).store
    return {name: store.read(name) for name in store.tensors}


@pytest.mark.parametrize("kills", [3, pytest.param(SLOW_KILLS, marks=[pytest.mark.slow, pytest.mark.timeout(6000)])])
def test_killed_and_resumed_runs_end_as_the_undisturbed_one(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    start_ranks: Callable[[dict[str, Any], int], list[BaseProcess]],
    kills: int,
) -> None:
    """SIGKILL all ranks at random times, resume each time; checkpoints are written at every step."""
    if kills == SLOW_KILLS and "slow" not in request.config.getoption("markexpr"):
        pytest.skip("takes minutes: run with -m slow")
    tokens, generator = write_tokens(tmp_path), random.Random(kills)
    train_steps = 4 * kills
    layout = (1, 1, 2, 2)
    common = {"train_steps": train_steps, "model": {"num_hidden_layers": 2}}
    for rank in start_ranks(tree(tmp_path / "whole", tokens, layout, **common, save_every=0), 2):
        rank.join(600)
        assert rank.exitcode == 0
    config = tree(tmp_path / "run", tokens, layout, **common, save_every=1, checkpoint={"keep_last": 2})
    root, newest, interrupted = tmp_path / "run" / "checkpoints", 0, 0
    for kill in range(kills):
        ranks = start_ranks(config, 2)
        # From the first new checkpoint on, so that each launch gets somewhere; the last ones may finish the run.
        deadline = time.monotonic() + 400  # the machine may be busy
        while max(steps(root), default=0) <= newest and all(rank.is_alive() for rank in ranks):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(generator.uniform(0.0, 0.3))
        for rank in ranks:
            if rank.is_alive():
                os.kill(rank.pid or 0, signal.SIGKILL)
        for rank in ranks:
            rank.join(30)
        interrupted += bool(leftovers(root))
        now = max(steps(root))
        assert now >= newest, f"kill {kill} lost a checkpoint"
        newest = now
    for rank in start_ranks(config, 2):
        rank.join(600)
        assert rank.exitcode == 0
    assert kills < SLOW_KILLS or interrupted > kills / 10
    whole, run = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "run")
    assert whole.keys() == run.keys()
    assert all(torch.equal(value, run[name]) for name, value in whole.items())
    lines = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, train_steps + 1))
