"""DeepSpeed's PipelineModule over the layers of the Hugging Face model."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import PipelineModule
from torch import nn

from benchmarks.alone import Step, hugging_face_model
from benchmarks.deepspeed_zero import configuration, fused_adamw
from benchmarks.workload import Workload

DEFAULT_SPLIT = "parameters"
BALANCED_SPLIT = "type:Decoder|Head"
"""As many decoder layers on each stage, the head counted as one: five and three of eight."""


class Decoder(nn.Module):
    """A decoder layer that makes its RoPE tables itself: only hidden states cross between stages."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(hidden.size(1)).unsqueeze(0)
        output: torch.Tensor = self.layer(hidden, position_embeddings=self.rotary(hidden, positions))
        return output


class Head(nn.Module):
    """Logits, under a name that a split can refer to."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(hidden)
        return logits


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def pipeline(workload: Workload, split: str) -> Step:
    """Its 1F1B schedule, all microbatches of the step in one pipeline."""
    model: Any = hugging_face_model(workload)
    inner = model.model
    decoders = [Decoder(layer, inner.rotary_emb) for layer in inner.layers]
    stage = PipelineModule(
        [inner.embed_tokens, *decoders, inner.norm, Head(model.lm_head)],
        num_stages=dist.get_world_size(),
        loss_fn=_loss,
        partition_method=split,
    )
    config = configuration(workload, workload.sequences, stage=0)
    engine, *_ = deepspeed.initialize(model=stage, optimizer=fused_adamw(stage), config=config)
    batches = workload.batches(workload.sequences, seed=0)

    def step() -> torch.Tensor:
        loss: torch.Tensor = engine.train_batch(iter(batches))
        return loss

    return step
