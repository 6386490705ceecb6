"""One rank of a cluster on fake tensors: a stage's step at full size is traced in seconds, and nothing is computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from support.tracer import Collective, Tracer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybrid.environment import disable_shared_memory_op, forget_deepspeed_groups
from hybrid.grid import Grid, build_grid
from hybrid.metrics.meter import Call, TrafficMeter
from hybrid.optim.build import optimizer_factory
from hybrid.optim.distributed import DistributedOptimizer
from hybrid.optim.settings import OptimizerSettings
from hybrid.optim.state import memory_bytes
from hybrid.pipeline import module as pipeline
from hybrid.pipeline.lora import add_adapters
from hybrid.planner.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one microbatch and the update cost a rank."""

    numel: int
    """Elements of the parameters that the rank trains."""
    memory: dict[str, int]
    """Bytes the optimizer holds, part by part."""
    kept: int
    """Bytes alive between forward and backward."""
    flops: int
    calls: list[Call]
    """Everything the rank moves, but for what crosses between stages and the step's one sum over the world."""
    backward: list[tuple[str, Collective]]
    """Those on the `tensor` and the `data` axis that the microbatch's backward issues."""
    output: int
    """Bytes of the hidden states that leave the stage; 0 of the last."""


@contextlib.contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """torch.distributed as rank `rank` of `size` sees it; its collectives return at once and change nothing."""
    disable_shared_memory_op()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        with mock.patch.dict("os.environ", LOCAL_RANK="0"):
            deepspeed.comm.init_distributed("fake", verbose=False, auto_mpi_discovery=False)
            yield
    finally:
        dist.destroy_process_group()
        forget_deepspeed_groups()


def trace_step(w: Workload, stage: int) -> Step:
    """A step of one microbatch on the first rank of a stage of the layout `w`, by the package's own layers.

    The engine is left out, and of the step what waits for numbers: norm, clipping and the sum over the world.
    """
    with fake_world(stage * w.t * w.d, w.parallel.world_size):
        grid = build_grid(w.parallel, w.model.num_key_value_heads)
        with FakeTensorMode():
            return _trace(w, stage, grid)


def _trace(w: Workload, stage: int, grid: Grid) -> Step:
    # What the weights are matters to nobody, and drawing them in blocks takes a while even when they are fake. They are
    # on their device already, and torch cannot move fake parameters in place.
    with (
        mock.patch.object(pipeline, "init_parameters"),
        mock.patch.object(pipeline.LlamaPipeline, "to", lambda self, device: self),
    ):
        module = pipeline.LlamaPipeline(
            w.model, grid, layers_per_stage=w.layers_per_stage, dtype=torch.bfloat16, device=torch.device("cpu"),
            seed=0, recompute=w.recompute,
        )  # fmt: skip
    if w.lora is not None:
        add_adapters(module, w.lora, grid, seed=0)
    numel = sum(param.numel() for param in module.parameters() if param.requires_grad)
    settings = OptimizerSettings(stage=w.zero_stage, bucket_size=w.bucket_size, nominal_tokens=w.tokens)
    make = optimizer_factory("AdamW", {"lr": 1e-4})
    optimizer = DistributedOptimizer(module.parameters_by_layer(), grid, settings, make)
    module.before_layer = optimizer.before_layer
    ids = torch.zeros(w.micro_batch_size, w.seq_length, dtype=torch.long)
    hidden = torch.zeros(w.held_tokens, 1, w.model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    module._rope(w.seq_length, ids.device)  # the tables are made once, not per microbatch
    with TrafficMeter(grid) as meter, Tracer() as tracer:
        output = module(ids if grid.is_first_stage else hidden)
        sent = 0 if grid.is_last_stage else output.nbytes
        if grid.is_last_stage:
            output, _ = module.loss_fn(output, ids)
        kept = tracer.live_bytes + (0 if grid.is_first_stage else hidden.nbytes)
        before = len(tracer.collectives)
        optimizer.begin_microbatch(last=True)
        torch.autograd.backward(output, torch.ones_like(output))
        optimizer.end_microbatch()
        backward = tracer.collectives[before:]
        optimizer.finish_gradients()
        optimizer.inner.step()
        optimizer.write_back()
        optimizer.wait_parameters()
    groups = {"tensor": grid.tensor_group, "data": grid.data_group}
    axes = {group.group_name: axis for axis, group in groups.items() if group is not None}
    return Step(
        numel=numel,
        memory=memory_bytes(optimizer),
        kept=kept,
        flops=tracer.flops,
        calls=meter.calls,
        backward=[(axes[c.group_name], c) for c in backward],
        output=sent,
    )
