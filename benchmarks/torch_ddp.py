"""torch's DistributedDataParallel over the Hugging Face model."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.alone import MasterWeights, Step, accumulate, hugging_face_loss, hugging_face_model
from benchmarks.workload import Workload


def ddp(workload: Workload) -> Step:
    """Gradients all-reduced in bf16 during the last microbatch's backward; the optimizer is not sharded."""
    model = DistributedDataParallel(
        hugging_face_model(workload), bucket_cap_mb=2 * workload.bucket_size / 2**20, gradient_as_bucket_view=True
    )
    weights = MasterWeights(list(model.parameters()))
    batches = workload.batches(workload.sequences // dist.get_world_size(), seed=dist.get_rank())

    def around(last: bool) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if last else model.no_sync()

    def step() -> torch.Tensor:
        mean = accumulate(lambda batch: hugging_face_loss(model, batch), batches, around)
        weights.step()
        return mean

    return step
