"""Start the ranks of a run on a machine with no GPU, where the launchers start a single process.

Imports neither torch nor DeepSpeed: the process that only starts and watches others is up at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from hybrid.environment import free_port, gpu_is_present, started_by_srun
from hybrid.signals import EXIT_STOPPED

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
GRACE = 10.0
"""Seconds between asking the remaining ranks to stop and killing them."""
POLL = 0.05
_PR_SET_PDEATHSIG = 1


def should_spawn(ranks: int, environ: Mapping[str, str] = os.environ) -> bool:
    """True if a model needs several `ranks` but was started as one process on a machine with no GPU."""
    if ranks == 1 or gpu_is_present(environ=environ) or started_by_srun(environ):
        return False
    return environ.get("WORLD_SIZE", "1") == "1" and environ.get("OMPI_COMM_WORLD_SIZE", "1") == "1"


def this_command() -> list[str]:
    """The command line that started this process."""
    return [sys.executable, *sys.orig_argv[1:]]


def spawn_ranks(ranks: int, argv: Sequence[str], grace: float = GRACE) -> int:
    """Run `argv` once per rank and watch until all have ended; the exit code to leave with.

    SIGTERM, SIGINT and SIGUSR1 are passed on. When a rank fails the others are stopped, and its code (128 + signal
    for one that was killed) is returned; EXIT_STOPPED is no failure. The ranks die with this process, whatever ends
    it. Call it before anything is set in the environment for one process (`prepare_process`): the ranks inherit it.
    """
    print(f"no GPU on this machine: starting {ranks} ranks on its CPU cores", file=sys.stderr, flush=True)
    port = free_port()
    children: list[subprocess.Popen[bytes]] = []
    with _forwarding(children):
        try:
            for rank in range(ranks):
                children.append(_start(rank, ranks, port, argv))
            return _watch(children, grace)
        finally:
            _stop(children, grace)


def _start(rank: int, ranks: int, port: int, argv: Sequence[str]) -> subprocess.Popen[bytes]:
    # A rank must not take the store of the torchrun that started this process for its own.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    environment |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [f"--local_rank={rank}" if word.startswith("--local_rank=") else word for word in argv]
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C then reaches the ranks once, forwarded, and not from the terminal as well
        preexec_fn=_die_with(os.getpid()),
    )


def _die_with(parent: int) -> Callable[[], None]:
    if not sys.platform.startswith("linux"):
        return lambda: None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return in_child


@contextlib.contextmanager
def _forwarding(children: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        for child in children:
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(children: Sequence[subprocess.Popen[bytes]], grace: float) -> int:
    while True:
        codes = [child.poll() for child in children]
        # One that was asked to end has saved with the others, which may have more to write: they end by themselves.
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0, EXIT_STOPPED)]
        if failed:
            # A killed rank is the cause of the errors its peers get from the lost connection.
            cause = min(failed, key=lambda rank: ((codes[rank] or 0) > 0, rank))
            code = codes[cause] or 0
            running = codes.count(None)
            ending = f"; stopping the other {running}" if running else ""
            print(f"rank {cause} {_ending(code)}{ending}", file=sys.stderr, flush=True)
            _stop(children, grace)
            return 128 - code if code < 0 else code
        if None not in codes:
            return max(code or 0 for code in codes)
        time.sleep(POLL)


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unnamed"
    return f"was killed by signal {-code} ({name})"


def _stop(children: Sequence[subprocess.Popen[bytes]], grace: float) -> None:
    for child in children:
        child.terminate()
    deadline = time.monotonic() + grace
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
