"""DeepSpeed's automatic tensor parallelism over the Hugging Face model."""

from __future__ import annotations

import torch.distributed as dist

from benchmarks.alone import Step
from benchmarks.deepspeed_zero import configuration, engine_step
from benchmarks.workload import Workload


def autotp(workload: Workload) -> Step:
    """AutoTP training as its one key sets it up; with fp32 master weights, which it has from stage 1 on."""
    config = configuration(workload, workload.sequences, stage=1)
    config["tensor_parallel"] = {"autotp_size": dist.get_world_size()}
    return engine_step(workload, config, workload.batches(workload.sequences, seed=0))
