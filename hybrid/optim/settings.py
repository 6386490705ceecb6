"""What the distributed optimizer is told, and what a step comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

NUM_FLAGS = 2
"""Of a step: what any rank wants every rank to know, at no collective of its own."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """What the distributed optimizer is told; see the configuration table for the keys behind it."""

    stage: Literal[0, 1, 2]
    bucket_size: int
    """Elements a bucket aims at."""
    nominal_tokens: int
    """Supervised tokens of a step in which no label is masked; gradients travel divided by it."""
    gradient_sharding: Literal["step", "microbatch"] = "microbatch"
    """Under stage 2: reduce every microbatch into a shard, or once a step from a full buffer."""
    wire_dtype: torch.dtype = torch.float32
    gradient_clipping: float = 0.0
    """Largest global norm of the gradient; 0 does not clip."""
    overlap: bool = True
    """Let the parameters' all-gather run on into the next forward."""
    max_skipped_steps: int = 20
    """Steps in a row without a finite gradient after which the run stops."""
    fp16: dict[str, Any] | None = None
    """DeepSpeed's `fp16` section when the model is in fp16."""


@dataclass(frozen=True)
class StepResult:
    """What a step came to, alike on every rank."""

    loss: float
    """Summed over the global batch's supervised tokens, divided by their number."""
    tokens: int
    grad_norm: float
    """fp32 norm of the gradient of that loss, before clipping."""
    skipped: bool
    reason: str = ""
    flags: tuple[bool, ...] = ()
    """Those of `raise_flags`, each true if any rank raised it."""
