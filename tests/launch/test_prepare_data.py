"""The command that prepares token files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hybrid.data.indexed import IndexedDataset
from launch.prepare_data import main


def test_prepare_and_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "d.jsonl").write_text('{"body": "hello"}\n{"body": ""}\n{"body": "world"}\n')
    arguments = ["--input", f"{tmp_path}/*.jsonl", "--tokenizer", "demo", "--output", str(tmp_path / "out" / "c")]
    assert main([*arguments, "--text_key", "body", "--cache_dir", str(tmp_path), "--workers", "1"]) == 0
    assert "2 documents" in capsys.readouterr().out
    assert len(IndexedDataset(tmp_path / "out" / "c")) == 2
    assert main(["inspect", str(tmp_path / "out" / "c")]) == 0
    shown = capsys.readouterr().out
    assert "skipped: 1 (empty text)" in shown and "'world</s>'" in shown


def test_without_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("hello")
    arguments = ["--input", str(tmp_path / "d.txt"), "--tokenizer", "demo", "--output", str(tmp_path / "c")]
    assert main([*arguments, "--no-append_eos", "--cache_dir", str(tmp_path)]) == 0
    assert 1 not in IndexedDataset(tmp_path / "c").read(0)


def test_a_fault_is_one_line_and_a_status(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\nnull\n')
    script = Path(__file__).parents[2] / "launch" / "prepare_data.py"
    arguments = ["--input", str(tmp_path / "d.jsonl"), "--tokenizer", "demo", "--output", str(tmp_path / "c")]
    done = subprocess.run(
        [sys.executable, str(script), *arguments, "--cache_dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(script.parents[1]), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("prepare_data.py: error: ") and "d.jsonl:2: found null" in line
