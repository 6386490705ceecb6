"""How a LLaMA is cut over a process grid: pure arithmetic, no torch, no processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

VOCAB_MULTIPLE = 128
"""Rows per rank of the padded vocabulary are a multiple of this, as in Megatron-LM."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the process grid."""

    tensor_model_parallel_size: int = 1
    """Ranks that share every matrix of a layer (Megatron-LM, Shoeybi et al. 2019)."""
    pipeline_model_parallel_size: int = 1
    """Stages the layers are cut into."""
    data_parallel_size: int = 1
    """Replicas of the pipeline, each with its own samples."""
    sequence_parallel: bool = False
    """Keep activations between the tensor-parallel regions cut along the sequence (Korthikanti et al. 2022)."""

    @property
    def world_size(self) -> int:
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.data_parallel_size


@dataclass(frozen=True)
class Shard:
    """Rows (or columns) `[start, stop)` of a dim of `size`, held alike by `replicas` tensor-parallel ranks.

    `owner` is true on exactly one of those ranks: the one that counts the shard in norms and writes it to files.
    """

    size: int
    start: int
    stop: int
    replicas: int = 1
    owner: bool = True

    @property
    def length(self) -> int:
        return self.stop - self.start


def even_shard(size: int, parts: int, index: int) -> Shard:
    """Part `index` of `size` cut into `parts` equal pieces.

    Raises:
        ValueError: `parts` does not divide `size`.
    """
    if size % parts:
        raise ValueError(f"{size} cannot be cut into {parts} equal parts")
    step = size // parts
    return Shard(size, index * step, (index + 1) * step)


def kv_replicas(num_key_value_heads: int, tensor_parallel_size: int) -> int:
    """Tensor-parallel ranks that hold the same key/value head: 1 unless there are more ranks than heads."""
    return max(1, tensor_parallel_size // num_key_value_heads)


def kv_head_shard(num_key_value_heads: int, tensor_parallel_size: int, rank: int) -> Shard:
    """Key/value heads of a rank; where heads are fewer than ranks, neighbours hold the same head.

    Raises:
        ValueError: neither number divides the other.
    """
    replicas = kv_replicas(num_key_value_heads, tensor_parallel_size)
    if replicas == 1:
        return even_shard(num_key_value_heads, tensor_parallel_size, rank)
    if tensor_parallel_size % num_key_value_heads:
        raise ValueError(f"{num_key_value_heads} key/value heads cannot be spread over {tensor_parallel_size} ranks")
    head = rank // replicas
    return Shard(num_key_value_heads, head, head + 1, replicas, owner=rank % replicas == 0)


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int) -> int:
    """The vocabulary rounded up so that each rank holds a multiple of `VOCAB_MULTIPLE` rows."""
    multiple = VOCAB_MULTIPLE * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def split_layers(num_layers: int, num_stages: int, first_cost: float = 0.0, last_cost: float = 0.0) -> tuple[int, ...]:
    """Decoder layers per stage with the smallest slowest stage.

    `first_cost` and `last_cost` are what the embedding and the head weigh, in decoder layers. Among the splits with
    the same slowest stage, the later stages get fewer layers, since the earlier ones hold more microbatches anyway.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ValueError(f"{num_layers} layers cannot fill {num_stages} pipeline stages: each needs at least one")
    extra = [0.0] * num_stages
    extra[0] += first_cost
    extra[-1] += last_cost
    counts = [1] * num_stages
    for _ in range(num_layers - num_stages):
        stage = min(range(num_stages), key=lambda s: (counts[s] + 1 + extra[s], s))
        counts[stage] += 1
    return tuple(counts)


def stage_ranges(layers_per_stage: Sequence[int]) -> list[range]:
    """The decoder layer indices of each stage."""
    ranges, start = [], 0
    for count in layers_per_stage:
        ranges.append(range(start, start + count))
        start += count
    return ranges


def rank_stages(num_stages: int, num_ranks: int, rank: int) -> range:
    """The stages of a pipeline rank: stage s lies on rank s modulo the ranks (Narayanan et al. 2021, section 2.2).

    With as many stages as ranks that is one each; with twice as many, rank 0 of 4 holds stages 0 and 4.
    """
    return range(rank, num_stages, num_ranks)
