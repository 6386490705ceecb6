"""This package's engine at a layout."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.alone import Step
from benchmarks.workload import CLIPPING, OPTIMIZER, SEED, Workload
from hybrid.config.parallel import ParallelConfig
from hybrid.grid import build_grid
from hybrid.optim.build import optimizer_factory
from hybrid.optim.engine import HybridEngine
from hybrid.optim.settings import OptimizerSettings
from hybrid.pipeline.module import LlamaPipeline


def build_engine(
    workload: Workload,
    *,
    tp: int = 1,
    pp: int = 1,
    interleaved: bool = False,
    sequence_parallel: bool = False,
    stage: int = 1,
    wire: torch.dtype = torch.float32,
) -> HybridEngine:
    """The engine over the running world, in bf16; what `tp` and `pp` leave is data parallel."""
    config = workload.config
    dp = dist.get_world_size() // (tp * pp)
    split = workload.interleaved if interleaved else workload.layers_per_stage
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        data_parallel_size=dp,
        sequence_parallel=sequence_parallel,
    )
    grid = build_grid(parallel, config.num_key_value_heads)
    module = LlamaPipeline(
        config,
        grid,
        layers_per_stage=split if pp > 1 else (config.num_hidden_layers,),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        seed=SEED,
    )
    ds_config = {
        "train_batch_size": workload.sequences,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": workload.sequences // dp,
        "zero_optimization": {"stage": 1},
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False, "use_reentrant": False},
        "steps_per_print": 10**9,
    }
    settings = OptimizerSettings(
        stage=stage,  # type: ignore[arg-type]
        bucket_size=workload.bucket_size,
        nominal_tokens=workload.sequences * workload.seq_length,
        gradient_clipping=CLIPPING,
        wire_dtype=wire,
    )
    return HybridEngine(
        module,
        grid,
        ds_config,
        settings,
        optimizer_factory("AdamW", OPTIMIZER),
        lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1.0),
    )


def package_step(engine: HybridEngine, workload: Workload) -> Step:
    """One step; also waits for the weights' all-gather, which in training would run on into the next step."""
    data = engine.grid.get_data_parallel_rank()
    batches = workload.batches(engine.micro_batches, seed=data)

    def step() -> torch.Tensor:
        loss: torch.Tensor = engine.train_batch(iter(batches))
        engine.optimizer.wait_parameters()
        if engine.optimizer.overflow:
            raise RuntimeError("the step was skipped, so that its time means nothing: the gradient is not finite")
        return loss

    return step
