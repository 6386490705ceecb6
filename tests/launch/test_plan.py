"""launch/plan.py as a user starts it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def plan(*words: object) -> tuple[int, str, float]:
    """Exit code, output and CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "launch/plan.py", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=120, env={"PYTHONPATH": str(ROOT)})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (
        done.returncode,
        done.stdout + done.stderr,
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    )


def test_seventy_billion_on_sixty_four(tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    code, output, seconds = plan(
        "--model", "llama3-70b", "--gpus", 64, "--gpu", "h100", "--seq_length", 8192, "--global_batch", 1024,
        "--write", path,
    )  # fmt: skip
    assert code == 0, output
    # CPU time: the machine may be busy.
    assert seconds < 2
    assert "layouts fit" in output and "do not fit into memory" in output and "MFU" in output
    assert json.loads(path.read_text())["train_batch_size"] == 1024


def test_scaling_table() -> None:
    code, output, _ = plan("--model", "llama2-7b", "--gpus", "8,64,512", "--global_batch", 1024)
    assert code == 0 and "strong scaling" in output and "weak scaling" in output and "speed-up" in output
    assert output.count("reported") == 3 and "reported: 7.5 on 64, 58 on 512, 220 on 2,048, times 8 GPUs" in output
    assert "GPT-1T on 3072 A100" in output and "arXiv:2104.04473, table 1" in output


def test_a_configuration_as_it_stands() -> None:
    code, output, _ = plan("--ds_config", "llama3_70b_tp8_pp8", "--gpus", 128, "--top", 2)
    assert code == 0 and "as configured:" in output and "TP8+SP PP8 DP2" in output


def test_nothing_fits(tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    small = ("--model", "llama3-70b", "--gpu", "l40s", "--write", path)
    code, output, _ = plan(*small, "--gpus", 8)
    assert code == 1 and not path.exists() and "the closest" in output
    enough = int(output.split("that are enough: --gpus ")[1].split()[0])
    assert plan(*small, "--gpus", enough // 2)[0] == 1 and plan(*small, "--gpus", enough)[0] == 0 and path.exists()
    code, output, seconds = plan("--model", "llama-1t", "--gpus", 3, "--gpu", "l40s", "--global_batch", 1)
    assert code == 1 and seconds < 2, output


def test_what_cannot_be_written_is_said_first(tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    for words, message in (
        (("--gpus", "8,16", "--write", path, "--choice", 2), "a configuration is for one number of GPUs"),
        (("--gpus", 8, "--write", path, "--choice", 999), "--choice 999 is no layout that fits: choose 1 to "),
        (("--gpus", 8, "--write", tmp_path / "no" / "my.json"), "there is no folder"),
        (("--gpus", 8, "--write", tmp_path), "is a folder: name a file"),
        (("--gpus", 8, "--write", "/proc/my.json"), "--write /proc/my.json: /proc cannot be written to"),
        (("--gpus", 0), "0 is no number of GPUs: it must be at least 1"),
    ):
        code, output, _ = plan("--model", "llama2-7b", *words)
        assert code == 2 and message in output and "TP1" not in output and not path.exists(), output


def test_errors_name_the_remedy() -> None:
    code, output, _ = plan("--model", "llama3-70c", "--gpus", 8)
    assert code == 2 and "did you mean llama3-70b" in output and "Traceback" not in output
    code, output, _ = plan("--model", "llama3-8b", "--gpus", "8,x")
    assert code == 2 and "Traceback" not in output
    code, output, _ = plan("--model", "llama3-8b")
    assert code == 2 and "--gpus" in output
    code, output, _ = plan("--model", "llama3-8b", "--gpus", 8, "--top", 0)
    assert code == 2 and "--top is 0: it must be at least 1" in output


def test_no_framework_is_imported() -> None:
    names = "torch deepspeed numpy transformers matplotlib".split()
    check = f"import sys; sys.path.insert(0, 'launch'); import plan; print([n for n in {names} if n in sys.modules])"
    done: Any = subprocess.run([sys.executable, "-c", check], cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
