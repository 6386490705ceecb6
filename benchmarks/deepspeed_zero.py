"""DeepSpeed's own ZeRO over the Hugging Face model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.alone import Step, hugging_face_loss, hugging_face_model, parameter_groups
from benchmarks.workload import CLIPPING, OPTIMIZER, Batch, Workload


def configuration(workload: Workload, micro_batches: int, stage: int) -> dict[str, Any]:
    """bf16 with the same buckets and clipping; other options as DeepSpeed sets them."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": workload.bucket_size,
            "allgather_bucket_size": workload.bucket_size,
        },
        "gradient_clipping": CLIPPING,
        "steps_per_print": 10**9,
    }


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The same optimizer as everywhere, in place of one that DeepSpeed would have to compile."""
    return torch.optim.AdamW(parameter_groups(list(model.parameters())), fused=True, **OPTIMIZER)


def engine_step(workload: Workload, config: dict[str, Any], batches: Sequence[Batch]) -> Step:
    """A step of DeepSpeed's engine without a pipeline."""
    model = hugging_face_model(workload)
    engine, *_ = deepspeed.initialize(model=model, optimizer=fused_adamw(model), config=config)

    def step() -> torch.Tensor:
        losses = []
        for batch in batches:
            loss = hugging_face_loss(engine, batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return step


def zero(workload: Workload, stage: int) -> Step:
    """ZeRO stage 1 or 2."""
    micro_batches = workload.sequences // dist.get_world_size()
    config = configuration(workload, micro_batches, stage)
    return engine_step(workload, config, workload.batches(micro_batches, seed=dist.get_rank()))
