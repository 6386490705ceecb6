"""From a resolved configuration to the workload that is planned for."""

from __future__ import annotations

import dataclasses

from hybrid.config.run import RunConfig
from hybrid.optim.policy import choose_policy
from hybrid.planner.parameters import largest_stage
from hybrid.planner.workload import Workload

_OPTIMIZER_STATES = {"adam": 2, "adamw": 2, "lion": 1}


def workload_of(run: RunConfig) -> Workload:
    """The workload of a run, with the gradients reduced as its optimizer will decide."""
    momentum = float(run.optimizer_params.get("momentum", 0.0))
    options, recompute = run.hybrid.optimizer, run.hybrid.recompute
    w = Workload(
        model=run.model,
        parallel=run.parallel,
        layers_per_stage=run.layers_per_stage,
        seq_length=run.hybrid.data.seq_length,
        micro_batch_size=run.micro_batch_size,
        micro_batches=run.gradient_accumulation_steps,
        precision=run.precision,
        recompute=recompute.granularity,
        recompute_layers=recompute.num_layers,
        zero_stage=run.zero_stage,
        bucket_size=run.reduce_bucket_size,
        wire=run.communication_dtype,
        optimizer_states=_OPTIMIZER_STATES.get(run.optimizer_type.lower(), 1 if momentum else 0),
        overlap=options.overlap,
        lora=run.hybrid.lora,
    )
    policy = choose_policy(
        options.gradient_sharding,
        stage=w.zero_stage,
        parameters=largest_stage(w),
        parameter_bytes=w.width,
        data_parallel_size=w.d,
        micro_batches=w.micro_batches,
        memory_bytes=None if options.memory_gib is None else options.memory_gib * 2**30,
    )
    return dataclasses.replace(w, gradient_sharding=policy.gradient_sharding)
