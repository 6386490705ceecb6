"""The comparison's runner at a tiny size: it reports, so here it only has to work."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.measure import Pair, Timing
from benchmarks.report import make_row, table
from benchmarks.workload import FULL, SMALL


def test_runner(tmp_path):
    command = [sys.executable, "-m", "benchmarks.peers", "--small", "--pairs", "1", "--rounds", "1"]
    command += ["--layouts", "dp2", "tp2-sp", "--output", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "peers.json").read_text())
    found = {(row["layout"], row["who"]) for row in result["rows"]}
    assert {("dp2", "hybrid"), ("dp2", "DeepSpeed ZeRO-1"), ("dp2", "torch DDP"), ("tp2-sp", "hybrid")} <= found
    assert all(row["wall"] > 0 and row["cpu"] > 0 for row in result["rows"])
    assert result["conditions"]["torch"] == torch.__version__
    assert "| dp2 | DeepSpeed ZeRO-1 |" in done.stdout


def test_ratios_are_medians_of_pairs():
    def pair(step, before, after, stalled=0.0):
        return Pair(Timing(step, step, 0.9), Timing(before, before, stalled), Timing(after, after, 0.0))

    pairs = [pair(3.0, 1.0, 2.0), pair(4.0, 1.0, 1.0, stalled=0.2), pair(3.0, 1.0, 1.0)]
    row = make_row("dp2", "someone", pairs, 0.05)
    assert (row.wall, row.cpu, row.seconds, row.pairs, row.quiet_pairs) == (3.0, 3.0, 3.0, 3, 2)
    assert "| dp2 | someone | 3.000" in table([row])


@pytest.mark.parametrize("workload", [FULL, SMALL])
def test_a_share_is_half_of_the_work(workload):
    from hybrid.metrics.flops import matmul_parameters

    def work(part):
        return part.sequences * matmul_parameters(part.config)

    for kind in ("data", "tensor", "pipe"):
        assert work(workload.share(kind)) == work(workload) / 2
    assert sum(workload.layers_per_stage) == workload.config.num_hidden_layers
