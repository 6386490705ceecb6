"""DeepSpeed's own ZeRO over the Hugging Face model."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from benchmarks.alone import Step, hugging_face_loss, hugging_face_model
from benchmarks.workload import CLIPPING, OPTIMIZER, Workload


def zero(workload: Workload, stage: int) -> Step:
    """ZeRO stage 1 or 2 with the same fused AdamW, buckets and clipping; its other options as DeepSpeed sets them."""
    micro_batches = workload.sequences // dist.get_world_size()
    config: dict[str, Any] = {
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
    model = hugging_face_model(workload)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    batches = workload.batches(micro_batches, seed=dist.get_rank())

    def step() -> None:
        for batch in batches:
            engine.backward(hugging_face_loss(engine, batch))
            engine.step()

    return step
