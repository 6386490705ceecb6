"""From a configuration to a module, where the ranks have to agree on what they run."""

from __future__ import annotations

import deepspeed.comm
import pytest
import torch
import torch.distributed as dist
from support.compiler import needs_compiler
from support.pool import WorkerPool

from hybrid.agreement import RemoteError
from hybrid.build import build_engine, build_module
from hybrid.config.errors import ConfigError
from hybrid.config.resolve import resolve_config
from hybrid.config.run import RunConfig
from hybrid.grid import build_grid


def run_with(kernels: str) -> RunConfig:
    """Of the demo's model in fp32, on two tensor-parallel ranks with sequence parallelism."""
    deepspeed.comm.init_distributed("gloo", verbose=False)
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    return resolve_config({"train_batch_size": 2, "hybrid": {"kernels": kernels, **layout}}, dist.get_world_size())


def refusal(kernels: str) -> str | None:
    run = run_with(kernels)
    grid = build_grid(run.parallel, run.model.num_key_value_heads)
    try:
        build_module(run, grid, torch.device("cpu"))
    except (ConfigError, RemoteError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_kernels_that_cannot_run_are_refused_once(pool: WorkerPool) -> None:
    assert pool.run(refusal, 2, "auto") == [None, None]
    own, remote = pool.run(refusal, 2, "liger")
    assert own.startswith("ConfigError: 1 problem in the configuration:") and remote.startswith("RemoteError: rank 0: ")
    for message in (own, remote):
        assert 'hybrid.kernels is "liger", but on rank 0: liger-kernel needs a CUDA device' in message


def losses(kernels: str) -> list[float]:
    """Of three steps on one batch."""
    run = run_with(kernels)
    engine = build_engine(run, build_grid(run.parallel, run.model.num_key_value_heads), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, run.model.vocab_size, (run.micro_batch_size, 33), generator=generator)
    batches = [(rows[:, :-1], rows[:, 1:])] * engine.micro_batches
    return [engine.train_batch(iter(batches)).item() for _ in range(3)]


@needs_compiler
def test_compiled_operators_train_as_torchs_do(pool: WorkerPool) -> None:
    compiled, plain = (pool.run(losses, 2, kernels) for kernels in ("compile", "torch"))
    assert plain[0][-1] < plain[0][0] and compiled[0] == compiled[1]
    assert compiled[0] == pytest.approx(plain[0], rel=1e-5)  # sums within a token are in another order
