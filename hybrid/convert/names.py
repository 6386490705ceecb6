"""The name table: which Hugging Face tensors a model has, and which slice of each goes where in the sharded one.

A pure description, made of the configuration alone; the layers of the running model describe themselves by the same
`Segment`, and tests hold the two equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hybrid.config.model import LlamaConfig
from hybrid.config.parallel import Shard, even_shard, kv_head_shard, padded_vocab_size, stage_ranges
from hybrid.tensor_parallel.embedding import vocab_shard
from hybrid.tensor_parallel.params import Segment, replicated

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"

_STATE_PREFIX = "optimizer."


def state_key(hf_name: str, state: str) -> str:
    """The key of a weight's optimizer state in a training checkpoint: `optimizer.lm_head.weight.master`.

    `state` is `master` (the fp32 weight), or what the optimizer keeps, as `exp_avg` and `exp_avg_sq`; all are fp32 and
    of the weight's shape. The weight itself, in the dtype it is computed with, has its Hugging Face name as key.
    """
    return f"{_STATE_PREFIX}{hf_name}.{state}"


def is_state_key(key: str) -> bool:
    """Whether a key names optimizer state, not a weight."""
    return key.startswith(_STATE_PREFIX)


@dataclass(frozen=True)
class Param:
    """One parameter of a pipeline layer, as one tensor-parallel rank holds it."""

    name: str
    """In its layer, as in `self_attn.qkv_proj.weight`."""
    shape: tuple[int, ...]
    """Of the rank's part, vocabulary padding included."""
    segments: tuple[Segment, ...]
    """The Hugging Face slices in it."""


Layer = tuple[Param, ...]
"""A pipeline layer: the embedding, a decoder block, the final norm or the head."""


class _Table:
    """The parameters of every pipeline layer on one tensor-parallel rank."""

    def __init__(self, config: LlamaConfig, tp_size: int, tp_rank: int) -> None:
        self.config, self.tp_size, self.tp_rank = config, tp_size, tp_rank

    def vocabulary(self, hf_name: str) -> Layer:
        vocab, hidden = self.config.vocab_size, self.config.hidden_size
        shard = vocab_shard(vocab, self.tp_size, self.tp_rank)
        rows = padded_vocab_size(vocab, self.tp_size) // self.tp_size
        return (Param("weight", (rows, hidden), (Segment(hf_name, (vocab, hidden), 0, shard),)),)

    def whole(self, name: str, hf_name: str, size: int) -> Param:
        return Param(name, (size,), (replicated(hf_name, (size,), self.tp_rank, self.tp_size),))

    def column(self, name: str, module: str, outputs: Sequence[tuple[str, Shard]], bias: bool) -> list[Param]:
        """Projections of one input in one parameter, one under the other, their rows cut."""
        hidden = self.config.hidden_size
        weights, biases, offset = [], [], 0
        for output, shard in outputs:
            partial = shard.replicas > 1
            weights.append(Segment(f"{module}.{output}.weight", (shard.size, hidden), 0, shard, offset, partial))
            biases.append(Segment(f"{module}.{output}.bias", (shard.size,), 0, shard, offset, partial))
            offset += shard.length
        params = [Param(f"{name}.weight", (offset, hidden), tuple(weights))]
        return params + ([Param(f"{name}.bias", (offset,), tuple(biases))] if bias else [])

    def row(self, name: str, hf_module: str, shard: Shard, bias: bool) -> list[Param]:
        """A projection whose columns are cut; its bias is held whole."""
        hidden = self.config.hidden_size
        segment = Segment(f"{hf_module}.weight", (hidden, shard.size), 1, shard)
        params = [Param(f"{name}.weight", (hidden, shard.length), (segment,))]
        return params + ([self.whole(f"{name}.bias", f"{hf_module}.bias", hidden)] if bias else [])

    def block(self, index: int) -> Layer:
        config, prefix = self.config, f"model.layers.{index}"
        q = _rows(even_shard(config.num_attention_heads, self.tp_size, self.tp_rank), config.head_dim)
        kv = _rows(kv_head_shard(config.num_key_value_heads, self.tp_size, self.tp_rank), config.head_dim)
        inner = even_shard(config.intermediate_size, self.tp_size, self.tp_rank)
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv, gate_up = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)], [("gate_proj", inner), ("up_proj", inner)]
        return (
            self.whole("input_layernorm.weight", f"{prefix}.input_layernorm.weight", config.hidden_size),
            *self.column("self_attn.qkv_proj", attention, qkv, config.attention_bias),
            *self.row("self_attn.o_proj", f"{attention}.o_proj", q, config.attention_bias),
            self.whole(
                "post_attention_layernorm.weight", f"{prefix}.post_attention_layernorm.weight", config.hidden_size
            ),
            *self.column("mlp.gate_up_proj", mlp, gate_up, config.mlp_bias),
            *self.row("mlp.down_proj", f"{mlp}.down_proj", inner, config.mlp_bias),
        )


def _rows(heads: Shard, head_dim: int) -> Shard:
    """The rows of a projection that belong to `heads`."""
    size, start, stop = (n * head_dim for n in (heads.size, heads.start, heads.stop))
    return Shard(size, start, stop, heads.replicas, heads.owner)


def pipeline_layers(config: LlamaConfig, tp_size: int, tp_rank: int) -> list[Layer]:
    """Every layer of the pipeline, in its order; the head of a tied model is the embedding once more.

    Raises:
        ValueError: the heads or the MLP cannot be cut into `tp_size` parts.
    """
    table = _Table(config, tp_size, tp_rank)
    return [
        table.vocabulary(EMBEDDING),
        *(table.block(index) for index in range(config.num_hidden_layers)),
        (table.whole("weight", FINAL_NORM, config.hidden_size),),
        table.vocabulary(EMBEDDING if config.tie_word_embeddings else HEAD),
    ]


def stage_layers(layers_per_stage: Sequence[int], pp_rank: int) -> range:
    """Indices into the pipeline's layers of one stage: the embedding goes first, norm and head last."""
    blocks = stage_ranges(layers_per_stage)[pp_rank]
    first, last = pp_rank == 0, pp_rank == len(layers_per_stage) - 1
    return range(0 if first else 1 + blocks.start, 1 + blocks.stop + (2 if last else 0))


def rank_segments(
    config: LlamaConfig, tp_size: int, layers_per_stage: Sequence[int], pp_rank: int, tp_rank: int
) -> list[Segment]:
    """The Hugging Face slices that rank (pp_rank, tp_rank) holds, in the order of its parameters."""
    layers = pipeline_layers(config, tp_size, tp_rank)
    segments = [
        s for index in stage_layers(layers_per_stage, pp_rank) for param in layers[index] for s in param.segments
    ]
    # On a single stage the tied head is not a second parameter.
    return segments[:-1] if config.tie_word_embeddings and len(layers_per_stage) == 1 else segments


def owned_segments(
    config: LlamaConfig, tp_size: int, layers_per_stage: Sequence[int]
) -> Iterator[tuple[int, int, list[Segment]]]:
    """(pp_rank, tp_rank, slices) of every rank; each slice of each tensor is given to exactly one of them."""
    for pp_rank in range(len(layers_per_stage)):
        for tp_rank in range(tp_size):
            segments = rank_segments(config, tp_size, layers_per_stage, pp_rank, tp_rank)
            if config.tie_word_embeddings and pp_rank > 0:
                segments = [s for s in segments if s.hf_name != EMBEDDING]
            yield pp_rank, tp_rank, [s for s in segments if s.shard.owner and s.shard.length]


def hf_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor of the model's Hugging Face checkpoint, in the order of the model."""
    segments = rank_segments(config, 1, (config.num_hidden_layers,), 0, 0)
    return {segment.hf_name: segment.hf_shape for segment in segments}
