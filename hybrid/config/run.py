"""The resolved configuration of a run: everything decided, nothing left to look up."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from hybrid.config.model import LlamaConfig
from hybrid.config.parallel import ParallelConfig
from hybrid.config.rampup import BatchRampup
from hybrid.config.training import HybridConfig

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run, for one world size."""

    ds: dict[str, Any]
    """DeepSpeed's keys as they stand in the file, with the batch triple and the defaults filled in."""
    hybrid: HybridConfig
    """The `hybrid` section."""
    model: LlamaConfig
    """The architecture that `hybrid.model` names."""
    parallel: ParallelConfig
    """The process grid."""
    precision: Precision
    """Dtype of weights and activations; master weights and moments are fp32 always."""
    zero_stage: Literal[0, 1, 2]
    """What is sharded over the data-parallel ranks: nothing, optimizer states, or gradients too."""
    micro_batch_size: int
    """Samples per forward pass of a replica."""
    gradient_accumulation_steps: int
    """Forward passes per optimizer step."""
    global_batch_size: int
    """Samples per optimizer step, over all replicas."""
    reduce_bucket_size: int
    """Elements per bucket of gradients."""
    communication_dtype: Precision
    """Dtype in which gradients travel; they are accumulated in fp32."""
    gradient_clipping: float
    """Largest norm of the gradient; 0 does not clip."""
    optimizer_type: str
    """Adam, AdamW, SGD or Lion."""
    optimizer_params: dict[str, Any]
    """Every parameter of that optimizer; Adam with coupled decay has `adam_w_mode` false."""
    layers_per_stage: tuple[int, ...]
    """Decoder layers of each pipeline stage, of which a rank holds several under the interleaved schedule."""

    @property
    def layers_per_rank(self) -> tuple[int, ...]:
        """Decoder layers of each pipeline rank."""
        ranks = self.parallel.pipeline_model_parallel_size
        return tuple(sum(self.layers_per_stage[rank::ranks]) for rank in range(ranks))

    @property
    def tokens_per_step(self) -> int:
        """Positions per optimizer step, masked ones included."""
        return self.global_batch_size * self.hybrid.data.seq_length

    def batch_size_at(self, samples_consumed: int) -> int:
        """Samples of the step that begins when so many were consumed."""
        rampup = self._rampup
        return self.global_batch_size if rampup is None else rampup.global_batch_size(samples_consumed)

    @property
    def train_samples(self) -> int:
        """Samples of the whole run."""
        steps, rampup = self.hybrid.training.train_steps, self._rampup
        return steps * self.global_batch_size if rampup is None else rampup.samples_after(steps)

    @property
    def _rampup(self) -> BatchRampup | None:
        given = self.hybrid.training.batch_rampup
        return None if given is None else BatchRampup(final=self.global_batch_size, **given.model_dump())

    def to_dict(self) -> dict[str, Any]:
        """The configuration as a file that gives the same run again, whatever becomes of the model's folder."""
        section = self.hybrid.model_dump(by_alias=True)
        section["model"] = self.model.to_hf(self.precision)
        section["pipeline_split"] = list(self.layers_per_stage)
        return {**self.ds, "hybrid": section}

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"
