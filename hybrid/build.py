"""From a resolved configuration to an engine, on every rank of a running world."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime import lr_schedules

from hybrid.agreement import everyone, from_rank_zero, rank_zero_first, together
from hybrid.checkpoint.select import verify
from hybrid.config.deepspeed import deepspeed_config, scheduler_of
from hybrid.config.run import RunConfig
from hybrid.convert.errors import CheckpointError
from hybrid.convert.hub import fetch
from hybrid.convert.load import check_model, load_weights
from hybrid.convert.manifest import is_manifest
from hybrid.grid import Grid
from hybrid.model.kernels import TORCH, Kernels, choose_kernels, kernels_problem
from hybrid.optim.build import optimizer_factory
from hybrid.optim.engine import HybridEngine
from hybrid.optim.policy import choose_policy
from hybrid.optim.schedule import lr_factor
from hybrid.optim.settings import OptimizerSettings
from hybrid.pipeline.lora import add_adapters
from hybrid.pipeline.module import LlamaPipeline

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_module(run: RunConfig, grid: Grid, device: torch.device) -> LlamaPipeline:
    """This rank's stage, its weights drawn from the seed or read from `hybrid.init_from`, adapters on them if the run
    trains those; a collective call."""
    recompute = run.hybrid.recompute
    source, resize_vocab = run.hybrid.init_from, run.hybrid.finetune.resize_vocab
    if source is not None:
        together(lambda: check_model(source, run.model, resize_vocab=resize_vocab))
        together(lambda: _check_bytes(source))
    module = LlamaPipeline(
        run.model,
        grid,
        layers_per_stage=run.layers_per_stage,
        dtype=DTYPES[run.precision],
        device=device,
        seed=run.hybrid.training.seed,
        recompute=recompute.granularity,
        recompute_layers=recompute.num_layers,
        kernels=_kernels(run, device),
    )
    if source is not None:
        together(lambda: load_weights(module, run.model, source, resize_vocab=resize_vocab))
    if run.hybrid.lora is not None:
        add_adapters(module, run.hybrid.lora, grid, run.hybrid.training.seed)
    return module


def _check_bytes(source: str) -> None:
    """Verify a checkpoint that has checksums, the ranks sharing the reading; a collective call.

    Raises:
        CheckpointError: something of it was changed since it was written; the same on every rank.
    """
    path = fetch(source)
    if from_rank_zero(is_manifest(path)) and (problems := verify(path)):
        raise CheckpointError(problems, source)


def _kernels(run: RunConfig, device: torch.device) -> Kernels:
    """What `hybrid.kernels` asks for, alike on all ranks, since replicated values must be; a collective call.

    Raises:
        ConfigError: the run names some that a rank cannot run.
    """
    wanted = run.hybrid.kernels
    problems = everyone(kernels_problem(wanted, device))
    problem = next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None), None)
    kernels = rank_zero_first(lambda: choose_kernels(wanted, problem))
    if dist.get_rank() == 0 and (device.type == "cuda" or kernels is not TORCH):
        logger.info("RMSNorm, SwiGLU and RoPE are %s%s", kernels.name, f" ({problem})" if problem else "")
    return kernels


def build_engine(run: RunConfig, grid: Grid, device: torch.device) -> HybridEngine:
    """The engine of this rank, over the module of `build_module`; a collective call."""
    module = build_module(run, grid, device)
    return HybridEngine(
        module,
        grid,
        deepspeed_config(run),
        optimizer_settings(run, _largest_stage(module)),
        optimizer_factory(run.optimizer_type, run.optimizer_params),
        lambda inner: make_scheduler(run, inner),
    )


def _largest_stage(module: LlamaPipeline) -> int:
    """Trainable parameters of the rank that has most: all ranks must choose alike."""
    numel = torch.tensor([sum(p.numel() for p in module.parameters() if p.requires_grad)])
    numel = numel.to(next(module.parameters()).device)
    if dist.get_world_size() > 1:
        dist.all_reduce(numel, op=dist.ReduceOp.MAX)
    return int(numel.item())


def optimizer_settings(run: RunConfig, parameters: int) -> OptimizerSettings:
    """What the configuration says to the distributed optimizer of a rank with so many trainable parameters."""
    options = run.hybrid.optimizer
    policy = choose_policy(
        options.gradient_sharding,
        stage=run.zero_stage,
        parameters=parameters,
        parameter_bytes=DTYPES[run.precision].itemsize,
        data_parallel_size=run.parallel.data_parallel_size,
        micro_batches=run.gradient_accumulation_steps,
        memory_bytes=None if options.memory_gib is None else options.memory_gib * 2**30,
    )
    if dist.get_rank() == 0:
        logger.info("gradients are reduced once a %s: %s", policy.gradient_sharding, policy.reason)
    return OptimizerSettings(
        stage=run.zero_stage,
        bucket_size=run.reduce_bucket_size,
        nominal_tokens=run.tokens_per_step,
        gradient_sharding=policy.gradient_sharding,
        wire_dtype=DTYPES[run.communication_dtype],
        gradient_clipping=run.gradient_clipping,
        overlap=options.overlap,
        max_skipped_steps=run.hybrid.training.max_skipped_steps,
        fp16=run.ds["fp16"] if run.precision == "fp16" else None,
    )


def make_scheduler(run: RunConfig, inner: torch.optim.Optimizer) -> Any:
    """The learning-rate scheduler: this package's schedule, or the one of DeepSpeed's `scheduler` section."""
    section = scheduler_of(run.ds)
    if section is not None:
        name, params = section
        return getattr(lr_schedules, name)(inner, **params)
    schedule = run.hybrid.training.lr_schedule
    assert schedule is not None, "the configuration has one of the two"
    return torch.optim.lr_scheduler.LambdaLR(inner, lr_factor(schedule, run.hybrid.training.train_steps))
