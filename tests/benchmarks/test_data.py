"""The data benchmark's runner with little of everything: it reports, so here it only has to work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch


def test_runner(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.data", "--small", "--folder", str(tmp_path), "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "data.json").read_text())
    assert result["conditions"]["torch"] == torch.__version__
    prepared = list(result["tokenising"].values())
    assert len(prepared) == 3 and prepared[0]["tokens"] == prepared[1]["tokens"] == prepared[2]["tokens"] > 100_000
    index = result["index"]
    # Each document's number, and of each sample three: where it begins, twice, and its place in the order.
    assert index["bytes_of_the_file"] >= 4 * (index["documents"] + 3 * index["samples"]) > index["bytes_in_memory"]
    figures = [*result["start"].values(), *result["first_batch_seconds"].values(), *result["step"].values()]
    assert all(seconds > 0 for seconds in figures)
    assert all(got["tokens_per_second"] > 0 for got in [*prepared, *result["loader"].values()])
    assert "| loader, documents marked, blended |" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["data.json"]
