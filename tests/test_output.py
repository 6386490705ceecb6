"""A full disk under standard output is one line on standard error, and an exit code."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest
from convert.cases import make_source
from rich.console import Console

from hybrid.convert import cli
from hybrid.entry import leave
from hybrid.metrics.recorder import MetricsRecorder
from hybrid.output import say
from launch import plan, prepare_data, pretrain

ROOT = Path(__file__).parents[1]


@contextmanager
def full_disk() -> Iterator[None]:
    """Nothing can be written to standard output."""
    with open("/dev/full", "w") as stream:
        with redirect_stdout(stream):
            yield
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # what is still in the buffer would fail again as the file is closed
        os.close(nowhere)


def ending(main: Callable[[], object], *words: object) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{main.__module__}.py", *map(str, words)])
        try:
            return main()
        except SystemExit as end:
            return end.code


def test_every_script_says_it_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = make_source(tmp_path / "hf", "llama2"), tmp_path / "sharded"
    (tmp_path / "d.txt").write_text("hello")
    corpus = ("--input", tmp_path / "d.txt", "--tokenizer", "demo", "--output", tmp_path / "c", "--cache_dir", tmp_path)
    for main, words in (
        (plan.main, ("--model", "llama3-8b", "--gpus", 8)),
        (plan.main, ("--model", "llama3-8b", "--gpus", "8,16")),
        (plan.main, ("--help",)),
        (pretrain.main, ("--ds_config", "z1", "--dry_run")),
        (prepare_data.main, corpus),
        (prepare_data.main, ("inspect", tmp_path / "c")),
        (cli.main, ("to-sharded", "--hf", source, "--output", out)),
        (cli.main, ("inspect", out)),
        (cli.main, ("verify", "--hf", source, "--checkpoint", out)),
    ):
        with full_disk():
            assert ending(main, *words) == 1, words
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"{main.__module__}.py: standard output cannot be written (No space left on device)"
    assert out.is_dir() and (tmp_path / "c.bin").is_file()  # what was asked for is there


def test_a_file_that_fills_up_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(plan.main, "--model", "llama3-8b", "--gpus", 8, "--write", "/dev/full") == 2
    assert "--write /dev/full cannot be written (No space left on device)" in capsys.readouterr().err


def test_nothing_is_left_to_fail_at_the_end() -> None:
    with open("/dev/full", "w") as stream:
        command = [sys.executable, "launch/plan.py", "--model", "llama3-8b", "--gpus", "8"]
        done = subprocess.run(command, cwd=ROOT, stdout=stream, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (
        1,
        "plan.py: standard output cannot be written (No space left on device)\n",
    )


def test_a_run_goes_on_without_its_console(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    monkeypatch.setattr("atexit._run_exitfuncs", lambda: None)
    with full_disk():
        recorder = MetricsRecorder(tmp_path, rank=0, total_steps=2, console=Console(file=sys.stdout))
        with caplog.at_level(logging.WARNING):
            for step in (1, 2):
                recorder.record_evaluation(step=step, eval_loss=1.0, eval_tokens=2)
        sys.stdout.write("still in the buffer")
        leave(lambda: 0)
    assert caplog.text.count("standard output cannot be written (No space left on device): the run goes on") == 1
    assert len((tmp_path / "evaluations.jsonl").read_text().splitlines()) == 2
    assert codes == [0]


def test_without_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    say("nobody hears it")
