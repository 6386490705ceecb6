"""From a configuration to a module, where the ranks have to agree on what they run."""

from __future__ import annotations

import deepspeed.comm
import torch
import torch.distributed as dist
from support.pool import WorkerPool

from hybrid.agreement import RemoteError
from hybrid.build import build_module
from hybrid.config.errors import ConfigError
from hybrid.config.resolve import resolve_config
from hybrid.grid import build_grid


def refusal(kernels: str) -> str | None:
    deepspeed.comm.init_distributed("gloo", verbose=False)
    tree = {"train_batch_size": 2, "hybrid": {"kernels": kernels, "tensor_model_parallel_size": 2}}
    run = resolve_config(tree, dist.get_world_size())
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
