"""Adapters on a pipeline stage."""

from __future__ import annotations

from dataclasses import replace

import torch

from hybrid.config.training import LoraConfig
from hybrid.grid import Grid
from hybrid.model.block import TransformerBlock
from hybrid.pipeline.module import LlamaPipeline
from hybrid.tensor_parallel.lora import LoraSettings, attach_lora
from hybrid.tensor_parallel.random import RNGTracker


def lora_settings(config: LoraConfig) -> LoraSettings:
    """What the configuration says of the adapters."""
    return LoraSettings(r=config.r, alpha=config.alpha, dropout=config.dropout, targets=tuple(config.targets))


def add_adapters(module: LlamaPipeline, config: LoraConfig, grid: Grid, seed: int) -> None:
    """Freeze the stage's weights, whatever they are by now, and give its projections adapters."""
    settings = lora_settings(config)
    rng = module.tp.rng
    if settings.dropout:
        if rng is None:
            device = next(module.parameters()).device
            rng = RNGTracker.for_rank(seed, grid.rank, device)
            module.tp = replace(module.tp, rng=rng)
        # Alike on tensor-parallel ranks only.
        torch.manual_seed(seed + 1 + grid.rank // grid.parallel.tensor_model_parallel_size)
        for block in module.modules():
            if isinstance(block, TransformerBlock):
                block.rng = rng  # a block that recomputes has to draw the same masks again
    attach_lora(module, settings, seed=seed, rng=rng)
