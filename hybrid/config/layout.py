"""Does the model fit the process grid and the run: every rule, with the values that would fit."""

from __future__ import annotations

from collections.abc import Iterable

from hybrid.config.batch import Batch
from hybrid.config.model import LlamaConfig
from hybrid.config.parallel import split_layers
from hybrid.config.training import HybridConfig


def tensor_parallel_sizes(model: LlamaConfig) -> list[int]:
    """The tensor-parallel sizes over which the model can be cut."""
    heads, kv = model.num_attention_heads, model.num_key_value_heads
    return [
        size
        for size in range(1, heads + 1)
        if heads % size == 0 and model.intermediate_size % size == 0 and (kv % size == 0 or size % kv == 0)
    ]


def _listed(values: Iterable[int]) -> str:
    return ", ".join(str(value) for value in values)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def world_problems(hybrid: HybridConfig, world_size: int | None) -> list[str]:
    """Whether whole replicas fill the world."""
    tp, pp = hybrid.tensor_model_parallel_size, hybrid.pipeline_model_parallel_size
    if world_size is None or world_size % (tp * pp) == 0:
        return []
    below = world_size // (tp * pp) * tp * pp
    counts = [below, below + tp * pp] if below else [tp * pp]
    return [
        f"world size {world_size} is not divisible by tensor_model_parallel_size {tp} x pipeline_model_parallel_size "
        f"{pp} = {tp * pp}: start {' or '.join(map(str, counts))} ranks, or choose sizes whose product is one of "
        f"{_listed(_divisors(world_size))}"
    ]


def tensor_problems(hybrid: HybridConfig, model: LlamaConfig) -> list[str]:
    """Whether heads, MLP and sequence can be cut over the tensor-parallel ranks."""
    tp = hybrid.tensor_model_parallel_size
    heads, kv = model.num_attention_heads, model.num_key_value_heads
    fit = f"valid tensor_model_parallel_size values for this model are {_listed(tensor_parallel_sizes(model))}"
    found = []
    if heads % tp:
        found.append(f"num_attention_heads {heads} is not divisible by tensor_model_parallel_size {tp}: {fit}")
    if kv % tp and tp % kv:
        found.append(
            f"num_key_value_heads {kv} and tensor_model_parallel_size {tp}: neither divides the other, so key/value "
            f"heads can be neither split nor replicated evenly: {fit}"
        )
    if model.intermediate_size % tp:
        found.append(
            f"intermediate_size {model.intermediate_size} is not divisible by tensor_model_parallel_size {tp}: {fit}"
        )
    length = hybrid.data.seq_length
    if hybrid.sequence_parallel and length % tp:
        found.append(
            f"seq_length {length} is not divisible by tensor_model_parallel_size {tp}, over which sequence_parallel "
            f"shards it: use {_neighbours(length, tp)}, or set sequence_parallel to false"
        )
    return found


def sequence_problems(hybrid: HybridConfig, model: LlamaConfig) -> list[str]:
    """Whether the model has positions for the sequence."""
    length, limit = hybrid.data.seq_length, model.rope.max_positions(model.max_position_embeddings)
    if length <= limit:
        return []
    return [
        f"seq_length {length} is longer than the {int(limit)} positions the model is made for (RoPE type "
        f"{model.rope.rope_type}, max_position_embeddings {model.max_position_embeddings}): use at most {int(limit)}, "
        "raise hybrid.model.max_position_embeddings to train on longer sequences as they are, or stretch RoPE with "
        "hybrid.model.rope_scaling"
    ]


def pipeline_problems(hybrid: HybridConfig, model: LlamaConfig) -> list[str]:
    """Whether every stage gets a layer and every layer a stage."""
    layers, pp, split = model.num_hidden_layers, hybrid.pipeline_model_parallel_size, hybrid.pipeline_split
    chunks, stages = hybrid.num_chunks, hybrid.num_stages
    wanted = f"pipeline_model_parallel_size {pp}" + (f" x pipeline_chunks {chunks} = {stages}" if chunks > 1 else "")
    found = _chunk_problems(hybrid)
    if layers < stages:
        remedy = f"valid pipeline_model_parallel_size values for this model are 1 to {layers}"
        if chunks > 1:
            fewer = f"use at most {layers // pp} pipeline_chunks" if layers >= 2 * pp else "use fewer stages"
            remedy = f"{fewer}, or pipeline_schedule 1f1b"
        found.append(f"num_hidden_layers {layers} is less than {wanted}, and each stage needs a layer: {remedy}")
    if split is not None:
        if len(split) != stages:
            found.append(
                f"pipeline_split {split} has {len(split)} numbers for {wanted}: give one per stage, or leave it out"
            )
        if sum(split) != layers:
            found.append(
                f"pipeline_split {split} covers {sum(split)} of num_hidden_layers {layers}: make the sum {layers}"
            )
        if any(count < 1 for count in split):
            found.append(f"pipeline_split {split} has a stage with no layer: each needs at least 1")
    recomputed = hybrid.recompute.num_layers
    if recomputed is not None and hybrid.recompute.granularity == "none":
        found.append(
            f"recompute.num_layers {recomputed} has no effect with recompute.granularity none: choose selective or "
            "full, or leave it out"
        )
    if recomputed is not None and recomputed > layers:
        found.append(f"recompute.num_layers {recomputed} is more than num_hidden_layers {layers}: use at most {layers}")
    return found


def _chunk_problems(hybrid: HybridConfig) -> list[str]:
    """Whether several stages on a rank make sense."""
    pp, chunks = hybrid.pipeline_model_parallel_size, hybrid.pipeline_chunks
    if hybrid.pipeline_schedule == "1f1b" and chunks is not None:
        return [
            f"pipeline_chunks {chunks} has no effect with pipeline_schedule 1f1b, under which a rank holds one stage: "
            "choose interleaved, or leave it out"
        ]
    if hybrid.pipeline_schedule == "interleaved" and pp == 1:
        return [
            f"pipeline_schedule interleaved cuts a pipeline's idle time, and pipeline_model_parallel_size {pp} has "
            "none: use at least 2, or pipeline_schedule 1f1b"
        ]
    return []


def microbatch_problems(hybrid: HybridConfig, batch: Batch) -> list[str]:
    """Whether the microbatches of every step fill the interleaved schedule, which takes them in groups of p."""
    pp, rampup = hybrid.pipeline_model_parallel_size, hybrid.training.batch_rampup
    if hybrid.pipeline_schedule != "interleaved":
        return []
    replicas = batch.micro_size * batch.data_parallel_size
    rule = f"no multiple of pipeline_model_parallel_size {pp}, as pipeline_schedule interleaved needs it"
    steps, found = batch.accumulation_steps, []
    if steps % pp:
        found.append(
            f"gradient_accumulation_steps {steps} is {rule}: use {_neighbours(steps, pp)} (train_batch_size "
            f"{_neighbours(steps, pp, replicas)}), or pipeline_schedule 1f1b"
        )
    if rampup is not None:
        odd = [size for size in range(rampup.start, batch.global_size, rampup.increment) if size % (replicas * pp)]
        if odd:
            found.append(
                f"hybrid.training.batch_rampup has sizes {odd} whose microbatches are {rule}: choose a start and an "
                f"increment that are multiples of {replicas * pp}, or pipeline_schedule 1f1b"
            )
    return found


def _neighbours(value: int, of: int, times: int = 1) -> str:
    """The multiples of `of` on both sides of `value`, `times` as large."""
    below = value // of * of
    return f"{below * times} or {(below + of) * times}" if below else str(of * times)


def schedule_problems(hybrid: HybridConfig) -> list[str]:
    """Whether the learning rate's decay fits into the run."""
    schedule, steps = hybrid.training.lr_schedule, hybrid.training.train_steps
    if schedule is None or schedule.decay_steps is None:
        return []
    if schedule.type != "wsd":
        return [
            f"lr_schedule.decay_steps {schedule.decay_steps} has no effect with lr_schedule.type {schedule.type}, "
            "which decays until train_steps: leave it out, or choose wsd"
        ]
    if schedule.decay_steps > steps:
        return [f"lr_schedule.decay_steps {schedule.decay_steps} is more than train_steps {steps}: use at most {steps}"]
    return []


def layout_problems(hybrid: HybridConfig, model: LlamaConfig) -> list[str]:
    """All that keeps the model from running on the grid."""
    return [
        *tensor_problems(hybrid, model),
        *pipeline_problems(hybrid, model),
        *sequence_problems(hybrid, model),
    ]


def balanced_split(model: LlamaConfig, num_stages: int, seq_length: int) -> tuple[int, ...]:
    """Decoder layers per stage, with the embedding and the head weighed by their arithmetic per token.

    A layer multiplies by its matrices and by seq_length / 2 keys and values (causal); the head by the vocabulary;
    the embedding copies a row and adds one to its gradient.
    """
    h = model.hidden_size
    q = model.num_attention_heads * model.head_dim
    kv = model.num_key_value_heads * model.head_dim
    layer = h * (2 * q + 2 * kv) + 3 * h * model.intermediate_size + q * seq_length
    head = h * model.vocab_size
    return split_layers(model.num_hidden_layers, num_stages, first_cost=h / layer, last_cost=head / layer)
