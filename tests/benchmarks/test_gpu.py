"""The GPU benchmark as far as it goes without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import deepspeed.comm
import pytest
import torch
from support.pool import WorkerPool

from benchmarks.gpu import Measured, configuration, measure, report
from hybrid.metrics.flops import peak_flops

ROOT = Path(__file__).parents[2]


def test_without_a_gpu_it_says_so() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "benchmarks.gpu measures a GPU, and torch sees none here\n"


def measured_on_the_cpu() -> Measured:
    deepspeed.comm.init_distributed("gloo", verbose=False)
    return measure(configuration("demo", 16, "torch"), torch.device("cpu"), 1)


def test_a_step_is_measured(pool: WorkerPool) -> None:
    [result] = pool.run(measured_on_the_cpu, 1)
    assert (result.kernels, result.device, result.tokens, result.mfu) == ("torch", "cpu", 2 * 4 * 16, None)
    assert result.seconds > 0 and result.peak_bytes > 0
    times = list(result.seconds_by_kernel.values())
    assert "aten::mm" in result.seconds_by_kernel and times == sorted(times, reverse=True)
    assert "| torch |" in report([result])


def test_the_report() -> None:
    peak = peak_flops("NVIDIA H200", "bf16")
    assert peak is not None
    # A step of half the peak: 1,000 tokens of peak / 4,000 FLOPs each in half a second.
    result = Measured(
        kernels="liger",
        device="NVIDIA H200",
        seconds=0.5,
        tokens=1000,
        flops_per_token=peak / 4000,
        peak_flops=peak,
        peak_bytes=3 * 2**29,
        seconds_by_kernel={"gemm": 0.3, "norm": 0.1},
    )
    assert result.mfu == pytest.approx(0.5)
    lines = report([result]).splitlines()
    assert "| liger | 500.0 | 2,000 | 50.0% | 1.50 |" in lines
    assert lines[-3:] == ["| gemm | 300.00 | 60.0% |", "| norm | 100.00 | 20.0% |", "| all | 400.00 | 80.0% |"]
