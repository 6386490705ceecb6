"""torch's FSDP2 over the Hugging Face model."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.alone import Step, accumulate, hugging_face_loss, hugging_face_model, parameter_groups
from benchmarks.workload import CLIPPING, OPTIMIZER, Workload


def fsdp2(workload: Workload) -> Step:
    """fp32 shards; one gather of bf16 weights and one bf16 reduce-scatter of gradients a step, its least traffic."""
    model: Any = hugging_face_model(workload).float()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.model.layers, model):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(parameter_groups(list(model.parameters())), fused=True, **OPTIMIZER)
    batches = workload.batches(workload.sequences // dist.get_world_size(), seed=dist.get_rank())

    def around(last: bool) -> contextlib.AbstractContextManager[object]:
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        return contextlib.nullcontext()

    def step() -> torch.Tensor:
        mean = accumulate(lambda batch: hugging_face_loss(model, batch), batches, around)
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return mean

    return step
