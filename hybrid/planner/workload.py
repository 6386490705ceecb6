"""What is planned for: a model, its layout over the ranks and the batch, and the local sizes that follow from them."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hybrid.config.model import LlamaConfig
from hybrid.config.parallel import ParallelConfig, kv_replicas, padded_vocab_size
from hybrid.config.run import Precision
from hybrid.config.training import LoraConfig
from hybrid.optim.policy import GradientSharding
from hybrid.pipeline.rounds import pipeline_rounds

Recompute = Literal["none", "selective", "full"]

BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


class LayerKind(NamedTuple):
    """What a decoder layer's cost depends on."""

    recompute: Recompute
    leading: bool
    """Nothing before it is trained, so that its input needs no gradient: the first layer under adapters."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step of one run. Sizes named `local_*` are those of one tensor-parallel rank."""

    model: LlamaConfig
    parallel: ParallelConfig
    layers_per_stage: tuple[int, ...]
    """Decoder layers of each stage; more stages than ranks are interleaved."""
    seq_length: int
    micro_batch_size: int
    micro_batches: int
    """Microbatches of a step on each pipeline (gradient accumulation steps)."""
    precision: Precision = "bf16"
    recompute: Recompute = "none"
    recompute_layers: int | None = None
    """The first so many layers of each rank recompute; None for all."""
    zero_stage: Literal[0, 1, 2] = 1
    gradient_sharding: GradientSharding = "step"
    bucket_size: int = 40_000_000
    """Elements."""
    wire: Precision = "fp32"
    """Dtype in which gradients travel under stages 1 and 2."""
    optimizer_states: int = 2
    """fp32 numbers the optimizer keeps per weight, beside the master copy."""
    overlap: bool = True
    lora: LoraConfig | None = None
    """The adapters, which alone are trained then; None where all weights are."""

    @property
    def t(self) -> int:
        """Tensor-parallel size."""
        return self.parallel.tensor_model_parallel_size

    @property
    def p(self) -> int:
        """Pipeline ranks. Where a function is given a `stage`, it is one of these, with all the stages it holds."""
        return self.parallel.pipeline_model_parallel_size

    @property
    def chunks(self) -> int:
        """Stages that each pipeline rank holds."""
        return len(self.layers_per_stage) // self.p

    def stages_of(self, stage: int) -> tuple[int, ...]:
        """The stages that a pipeline rank holds: r, r + p, r + 2 p, ..."""
        return tuple(range(stage, len(self.layers_per_stage), self.p))

    def chunk_layers(self, stage: int) -> tuple[int, ...]:
        """Decoder layers of each of a rank's stages."""
        return self.layers_per_stage[stage :: self.p]

    def layers(self, stage: int) -> int:
        """Decoder layers of a rank."""
        return sum(self.chunk_layers(stage))

    @property
    def d(self) -> int:
        """Data-parallel size."""
        return self.parallel.data_parallel_size

    @property
    def width(self) -> int:
        """Bytes of a weight or an activation."""
        return BYTES[self.precision]

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.seq_length * self.micro_batch_size

    @property
    def sequence_sharded(self) -> bool:
        """Hidden states are cut along the sequence."""
        return self.parallel.sequence_parallel and self.t > 1

    @property
    def held_tokens(self) -> int:
        """Tokens of a microbatch whose hidden states a rank holds between the tensor-parallel regions."""
        return self.tokens // self.t if self.sequence_sharded else self.tokens

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.tokens * self.micro_batches * self.d

    @property
    def local_q(self) -> int:
        """Width of the queries."""
        return self.model.num_attention_heads * self.model.head_dim // self.t

    @property
    def local_kv(self) -> int:
        """Width of the keys, and of the values; a head that several ranks hold counts on each."""
        heads = self.model.num_key_value_heads * kv_replicas(self.model.num_key_value_heads, self.t) // self.t
        return heads * self.model.head_dim

    @property
    def local_mlp(self) -> int:
        """Width of the gated MLP."""
        return self.model.intermediate_size // self.t

    @property
    def local_vocab(self) -> int:
        """Rows of the embedding and of the head, padding included."""
        return padded_vocab_size(self.model.vocab_size, self.t) // self.t

    def recomputing(self, stage: int) -> int:
        """Layers of a rank that recompute."""
        if self.recompute == "none":
            return 0
        layers = self.layers(stage)
        return layers if self.recompute_layers is None else min(self.recompute_layers, layers)

    def layer_kinds(self, stage: int, chunk: int | None = None) -> Counter[LayerKind]:
        """The layers of a rank by kind, or those of one of its stages."""
        held = self.chunk_layers(stage)
        before, layers = (0, sum(held)) if chunk is None else (sum(held[:chunk]), held[chunk])
        recomputing = min(max(0, self.recomputing(stage) - before), layers)
        kinds = Counter({LayerKind("none", False): layers - recomputing})
        kinds[LayerKind(self.recompute, False)] += recomputing
        if self.lora is not None and stage == before == 0:
            first = self.recompute if recomputing else "none"
            kinds[LayerKind(first, False)] -= 1
            kinds[LayerKind(first, True)] += 1
        return +kinds

    def in_flight(self, stage: int) -> list[tuple[int, ...]]:
        """Microbatches whose activations a rank holds for each of its stages, after one or another forward.

        1F1B holds as many as there are stages from this one on (Narayanan et al. 2021), if there are so many.
        """
        if self.chunks == 1:
            return [(min(self.micro_batches, self.p - stage),)]
        return _interleaved_moments(self.micro_batches, self.p, stage, self.chunks)

    def distinct_stages(self) -> list[tuple[int, int]]:
        """(stage, how many are like it) but for the microbatches in flight, of which the one given has most."""
        counts: dict[tuple[tuple[int, ...], bool, bool], list[int]] = {}
        for stage in range(self.p):
            counts.setdefault((self.chunk_layers(stage), stage == 0, stage == self.p - 1), []).append(stage)
        return [(stages[0], len(stages)) for stages in counts.values()]


@functools.cache
def _interleaved_moments(micro_batches: int, ranks: int, rank: int, chunks: int) -> list[tuple[int, ...]]:
    """`Workload.in_flight` of the interleaved schedule: each set of numbers once, since a steady step repeats them."""
    held, moments = [0] * chunks, set()
    # Fewer than two groups of microbatches fill the pipeline, and every group after them repeats the one before.
    for forward, backward in pipeline_rounds(min(micro_batches, 4 * ranks), ranks, rank, chunks):
        if forward is not None:
            held[forward[0]] += 1
            moments.add(tuple(held))
        if backward is not None:
            held[backward[0]] -= 1
    return sorted(moments)
