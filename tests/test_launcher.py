"""Starting the ranks of a run on a machine with no GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hybrid import launcher

ROOT = Path(launcher.__file__).parents[1]

# One write per line: the ranks share a pipe, where `print` may come in pieces.
PREAMBLE = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""

Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Start a script as every rank of a world, under a parent like a launch command."""

    def start(body: str, *, ranks: int = 2, grace: float = 2.0, arguments: str = "") -> subprocess.Popen[str]:
        child = tmp_path / "child.py"
        child.write_text(PREAMBLE + textwrap.dedent(body))
        parent = tmp_path / "parent.py"
        parent.write_text(
            "import sys\nfrom hybrid.launcher import spawn_ranks\n"
            f"sys.exit(spawn_ranks({ranks}, [sys.executable, {str(child)!r}, *{arguments.split()!r}], {grace}))\n"
        )
        return subprocess.Popen(
            [sys.executable, str(parent)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TORCHELASTIC_USE_AGENT_STORE": "True"},
        )

    return start


def children_of(process: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    """The `count` children, once each has printed that it is ready."""
    assert process.stdout is not None
    for _ in range(count):
        assert process.stdout.readline().startswith("ready")
    children: list[psutil.Process] = psutil.Process(process.pid).children(recursive=True)
    return children


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive


def test_ranks_get_a_launchers_environment_and_the_same_command(run: Run) -> None:
    process = run(
        """
        names = ["LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
        say(rank, *[os.environ[name] for name in names], *sys.argv[1:], any("ELASTIC" in n for n in os.environ))
        """,
        ranks=3,
        arguments="--local_rank=0 --seed 1",
    )
    out, err = process.communicate(timeout=20)
    lines = sorted(line.split() for line in out.splitlines())
    port = lines[0][5]
    assert lines == [
        [str(r), str(r), "3", "3", "127.0.0.1", port, f"--local_rank={r}", "--seed", "1", "False"] for r in range(3)
    ]
    assert process.returncode == 0
    assert err == "no GPU on this machine: starting 3 ranks on its CPU cores\n"


def test_a_failing_rank_stops_the_others_and_its_code_is_returned(run: Run) -> None:
    start = time.monotonic()
    process = run("sys.exit(7) if rank == 1 else time.sleep(600)", ranks=3)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 7
    assert "rank 1 exited with code 7; stopping the other 2" in err
    assert time.monotonic() - start < 10


def test_a_rank_that_ends_as_asked_leaves_the_others_their_time(run: Run) -> None:
    process = run("rank and sys.exit(75); time.sleep(1); say('all written'); sys.exit(75)")
    out, err = process.communicate(timeout=20)
    assert process.returncode == 75
    assert "all written" in out and "stopping" not in err


def test_a_killed_rank_is_named_and_stubborn_ones_are_killed(run: Run) -> None:
    process = run(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say("ready")
        time.sleep(600)
        """,
        grace=0.5,
    )
    children = children_of(process, 2)
    victim = next(child for child in children if child.environ()["RANK"] == "1")
    victim.kill()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGKILL
    assert "rank 1 was killed by signal 9 (SIGKILL); stopping the other 1" in err
    assert_gone(children)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_passed_on_once(run: Run, number: signal.Signals) -> None:
    process = run(
        f"""
        seen = []
        signal.signal({int(number)}, lambda *_: seen.append(1))
        say("ready")
        deadline = time.time() + 20
        while not seen and time.time() < deadline:
            time.sleep(0.02)
        time.sleep(0.3)
        say("seen", len(seen))
        """
    )
    children_of(process, 2)
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert out.splitlines() == ["seen 1"] * 2
    assert process.returncode == 0


def test_an_untreated_signal_ends_all_with_its_code(run: Run) -> None:
    process = run("say('ready'); time.sleep(600)")
    children = children_of(process, 2)
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert_gone(children)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel kills orphans on Linux only")
def test_no_rank_outlives_a_killed_parent(run: Run) -> None:
    process = run("say('ready'); time.sleep(600)")
    children = children_of(process, 2)
    process.kill()
    process.communicate(timeout=20)
    assert_gone(children)


def test_spawning_only_where_one_process_must_do_for_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "gpu_is_present", lambda environ: environ.get("GPU") == "yes")
    assert launcher.should_spawn(2, {})
    assert launcher.should_spawn(2, {"WORLD_SIZE": "1", "RANK": "0"})
    assert not launcher.should_spawn(1, {})
    assert not launcher.should_spawn(2, {"WORLD_SIZE": "2", "RANK": "0"})
    assert not launcher.should_spawn(2, {"GPU": "yes"})
    assert not launcher.should_spawn(2, {"OMPI_COMM_WORLD_SIZE": "2"})
    task = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}
    assert not launcher.should_spawn(2, task)


def test_importing_the_launcher_imports_no_torch() -> None:
    code = "import sys, hybrid.launcher; sys.exit(any(name in sys.modules for name in ('torch', 'deepspeed', 'numpy')))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=20)


def test_the_command_is_repeated_with_its_interpreter_options() -> None:
    code = "from hybrid.launcher import this_command; print(*this_command()[1:3])"
    done = subprocess.run([sys.executable, "-u", "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "-u -c\n"
