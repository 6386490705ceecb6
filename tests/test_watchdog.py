"""A dead rank is named by the survivors, which end within a bound."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybrid.watchdog import EXIT_RANK_DIED

ROOT = Path(__file__).parents[1]

BODY = """
import os, sys, time
from hybrid.watchdog import Watchdog
rank, port = int(sys.argv[1]), int(sys.argv[2])
watchdog = Watchdog(rank, 3, "127.0.0.1", port, beat=0.1, silence=1.0, grace=0.3)
os.write(1, f"{watchdog.port}\\n".encode())
if sys.argv[3] == "leave":
    sys.stdin.readline()
    watchdog.close()
    sys.exit(0)
time.sleep(600)  # as in a collective that the dead rank never joins
"""


def start(kind: str = "stay") -> list[subprocess.Popen[str]]:
    ranks: list[subprocess.Popen[str]] = []
    port = "0"
    for rank in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", BODY, str(rank), port, kind],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        ranks.append(process)
        assert process.stdout is not None
        port = process.stdout.readline().strip()
    time.sleep(0.3)
    return ranks


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_named_and_the_others_end(victim: int) -> None:
    ranks = start()
    began = time.monotonic()
    ranks[victim].kill()
    for rank, process in enumerate(ranks):
        output = process.communicate(timeout=20)[1]
        if rank != victim:
            assert process.returncode == EXIT_RANK_DIED
            assert f"rank {victim} is gone: its process has died" in output
    assert time.monotonic() - began < 5


def test_a_frozen_rank_counts_as_dead(tmp_path: Path) -> None:
    ranks = start()
    ranks[1].send_signal(signal.SIGSTOP)
    for rank in (0, 2):
        output = ranks[rank].communicate(timeout=20)[1]
        assert "rank 1 is gone: nothing was heard of it for 1 s" in output
    ranks[1].kill()
    ranks[1].communicate(timeout=5)


def test_ranks_that_take_leave_are_not_dead() -> None:
    ranks = start("leave")
    for rank in (2, 0, 1):
        process = ranks[rank]
        assert process.communicate("\n", timeout=20)[1] == "" and process.returncode == 0
        time.sleep(0.5)


def test_strangers_are_ignored() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BODY, "0", "0", "leave"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    port = int(process.stdout.readline())
    for line in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b""):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(line)
        time.sleep(0.3)
    assert process.poll() is None
    assert process.communicate("\n", timeout=20)[1] == "" and process.returncode == 0
