"""The comparison's runner at a tiny size: it reports, so here it only has to work."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.llama import make_batches, make_engine, my_batches, small_config

from benchmarks.measure import Pair, Started, Timing, start
from benchmarks.report import Row, make_row, same_losses, table
from benchmarks.stubs import collectives_stubbed
from benchmarks.workload import FULL, SMALL
from hybrid.metrics.meter import TrafficMeter

STUBBED = "hybrid, collectives stubbed"
CONTESTANTS = {
    "dp2": {"hybrid", "hybrid bf16 wire", STUBBED, "DeepSpeed ZeRO-1", "torch FSDP2", "torch DDP"},
    "tp2": {"hybrid", STUBBED, "torch DTensor", "DeepSpeed AutoTP"},
    "tp2-sp": {"hybrid", STUBBED, "torch DTensor"},
    "pp2": {
        "hybrid",
        STUBBED,
        "DeepSpeed PipelineModule, balanced split",
        "DeepSpeed PipelineModule, default split",
    },
}


def test_runner(tmp_path):
    command = [sys.executable, "-m", "benchmarks.peers", "--small", "--pairs", "1", "--rounds", "1"]
    command += ["--layouts", *CONTESTANTS, "--output", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "peers.json").read_text())
    rows = {(row["layout"], row["who"]): row for row in result["rows"]}
    assert {(layout, who) for layout, names in CONTESTANTS.items() for who in names} <= set(rows)
    for key, row in rows.items():
        assert not row["error"], key
        assert row["wall"] > 0 and row["cpu"] > 0
        assert row["same_losses"] is not False, (key, row["losses"])
        assert len(row["losses"]) == (0 if "stubbed" in key[1] else 2)
    assert result["conditions"]["torch"] == torch.__version__
    assert "| dp2 | DeepSpeed ZeRO-1 |" in done.stdout
    assert (tmp_path / "peers.svg").stat().st_size


def starts():
    """The error of one that only rank 1 cannot build, and the losses of one that runs."""

    def refuses():
        if dist.get_rank() == 1:
            raise NotImplementedError("not at this version | of it\nand more")
        return lambda: torch.tensor(0.0)

    losses = iter((2.0, 1.0))
    started = start(lambda: lambda: torch.tensor(next(losses) + dist.get_rank()))
    assert isinstance(started, Started)
    return start(refuses), started.losses


def test_who_cannot_run_is_listed_with_the_error(pool):
    for error, losses in pool.run(starts, 2):
        assert error == "NotImplementedError: not at this version | of it"
        assert losses == (2.5, 1.5)
    assert "does not run: NotImplementedError: not" in table([Row(layout="tp2", who="someone", error=error)])


def stubbed_calls():
    config = small_config()
    engine, grid = make_engine(config, pp=2, micro_batches=2, batch=1)
    batches = iter(my_batches(make_batches(4, 1, 8, config.vocab_size), grid, 2))
    engine.train_batch(batches)
    with TrafficMeter(grid) as meter, collectives_stubbed():
        engine.train_batch(batches)
    return [(call.op, call.payload) for call in meter.calls]


def test_of_a_stubbed_pipeline_the_order_and_the_decision_stay(pool):
    """One element of each microbatch in each direction, and six numbers in fp64."""
    assert pool.run(stubbed_calls, 2) == [[("send", 4)] * 2 + [("all_reduce", 48)]] * 2


def test_losses_are_told_apart():
    assert same_losses((6.2597, 6.2443), (6.2596, 6.2444))
    assert not same_losses((6.2624, 6.2470), (6.2597, 6.2443))  # other data
    assert not same_losses((6.2597, 6.2481), (6.2597, 6.2443))  # another update


def test_ratios_are_medians_of_pairs():
    def pair(step, before, after, stalled=0.0):
        return Pair(Timing(step, step, 0.9), Timing(before, before, stalled), Timing(after, after, 0.0))

    pairs = [pair(3.0, 1.0, 2.0), pair(4.0, 1.0, 1.0, stalled=0.2), pair(3.0, 1.0, 1.0)]
    row = make_row(Row(layout="dp2", who="someone", losses=(9.0, 8.9)), pairs, 0.05)
    assert (row.wall, row.cpu, row.seconds, row.pairs, row.quiet_pairs) == (3.0, 3.0, 3.0, 3, 2)
    assert "| dp2 | someone | 3.000" in table([row])
    assert "9.0000, 8.9000 differ!" in table([replace(row, same_losses=False)])


@pytest.mark.parametrize("workload", [FULL, SMALL])
def test_a_share_is_half_of_the_work(workload):
    from hybrid.metrics.flops import matmul_parameters

    def work(part):
        return part.sequences * matmul_parameters(part.config)

    for kind in ("data", "tensor", "pipe"):
        assert work(workload.share(kind)) == work(workload) / 2
    assert sum(workload.layers_per_stage) == workload.config.num_hidden_layers
