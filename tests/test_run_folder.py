"""A run's folder belongs to one run at a time, and one that cannot be used is refused before any work."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid.config.errors import ConfigError
from hybrid.run_folder import LOCK, held

ROOT = Path(__file__).parents[1]

HOLD = """
import pathlib, sys, time
from hybrid.run_folder import held
with held(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_run_is_told_of_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with held(folder):
        signed = (folder / LOCK).read_text()
        with pytest.raises(ConfigError) as refused, held(folder):
            pass
        said = str(refused.value)
        assert f"output_dir is {folder}, where another run is at work (on host {os.uname().nodename}, " in said
        assert f"process {os.getpid()}, since 20" in said and "--output_dir" in said
        assert (folder / LOCK).read_text() == signed
        (folder / LOCK).write_text("")
        with pytest.raises(ConfigError, match="started just now"), held(folder):
            pass
    with held(folder):
        pass


def test_a_refused_run_leaves_no_folder_that_it_made(tmp_path: Path) -> None:
    new, old, used = tmp_path / "new", tmp_path / "old", tmp_path / "used"
    old.mkdir()
    for folder in (new, old, used):
        with held(folder):
            if folder is used:
                (used / "config.json").touch()
    assert not new.exists() and old.is_dir() and (used / "config.json").exists()


def test_a_lock_that_was_removed_meanwhile_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock

    def remove_once(handle: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        (tmp_path / LOCK).unlink()
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", remove_once)
    with held(tmp_path):
        with pytest.raises(ConfigError, match="another run is at work"), held(tmp_path):
            pass


def test_a_killed_run_leaves_the_folder_free_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"process {process.pid}, "), held(tmp_path):
            pass
        process.kill()
        process.wait()
        with held(tmp_path):
            pass


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), held(tmp_path / "run"):
        pass
    assert "cannot be locked (No locks available): see to it that no second run" in caplog.text


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "locked" / LOCK).mkdir(parents=True)
    for folder in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run"), tmp_path / "locked"):
        with pytest.raises(ConfigError, match=rf"output_dir is {folder}, which cannot be written to \("), held(folder):
            pass
