"""SIGTERM and SIGUSR1 ask a launch to end; a second one ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybrid.config.training import TrainingConfig
from hybrid.limits import Limits
from hybrid.signals import EXIT_STOPPED, StopSignals

ROOT = Path(__file__).parents[1]

BODY = """
import ctypes, os, sys, time
from hybrid.signals import StopSignals
with StopSignals() as signals:
    os.write(1, b"ready\\n")
    if sys.argv[1] == "polite":
        while signals.received is None:
            time.sleep(0.01)
        print(signals.received.name, flush=True)
        sys.exit(75)
    libc = ctypes.CDLL(None)
    while True:
        libc.usleep(60_000_000)  # as in a collective: no Python handler runs in the main thread meanwhile
"""


def start(kind: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", BODY, kind], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_first_is_a_request(number: signal.Signals) -> None:
    process = start("polite")
    process.send_signal(number)
    assert process.communicate(timeout=30)[0] == f"{number.name}\n" and process.returncode == 75


def test_the_second_ends_the_process_at_once_even_in_a_blocking_call() -> None:
    process = start("stuck")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # the launcher's copy of the scheduler's signal
    time.sleep(1.0)
    assert process.poll() is None
    process.send_signal(signal.SIGUSR1)
    assert process.wait(5) == 128 + signal.SIGUSR1


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        assert signal.getsignal(signal.SIGTERM) != before
        assert signals.received is None
    assert signal.getsignal(signal.SIGTERM) == before and signal.set_wakeup_fd(-1) == -1


def test_limits() -> None:
    limits = Limits(TrainingConfig(stop_after_steps=2), None)
    limits.count_step(asked=False)
    assert not limits.asked and not limits.reached
    limits.count_step(asked=False)
    assert limits.reached and limits.exit_code == 0 and "stop_after_steps" in limits.reason
    late = Limits(TrainingConfig(max_wall_time=1e-9), None)
    assert late.asked and not late.reached
    late.count_step(asked=True)
    assert late.reached and late.exit_code == EXIT_STOPPED and "max_wall_time" in late.reason


@pytest.mark.parametrize(
    "text, seconds", [("90", 90.0), ("1:30", 90.0), ("2:00:00", 7200.0), ("1-01:00:00", 90000.0), (12, 12.0)]
)
def test_wall_times(text: object, seconds: float) -> None:
    assert TrainingConfig.model_validate({"max_wall_time": text}).max_wall_time == seconds


@pytest.mark.parametrize("text", ["soon", "0", "1:2:3:4:5", -1])
def test_wrong_wall_times(text: object) -> None:
    with pytest.raises(ValueError):
        TrainingConfig.model_validate({"max_wall_time": text})


@pytest.mark.parametrize("command", ["plan.py --model llama3-8b --gpus 64", "pretrain.py --ds_config z2 --dry_run"])
def test_a_reader_that_has_seen_enough_is_no_error(command: str) -> None:
    script, *arguments = command.split()
    words = [sys.executable, f"launch/{script}", *arguments]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == -signal.SIGPIPE


def test_a_process_without_output_ends_well() -> None:
    words = [sys.executable, "launch/pretrain.py", "--ds_config", "z2", "--dry_run"]
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *words]
    process = subprocess.run(closed, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")
