"""A run in words: its resolved configuration, and which rank holds what. Needs no ranks."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid.config.model import num_parameters
from hybrid.config.parallel import even_shard, kv_head_shard, padded_vocab_size, rank_stages, stage_ranges
from hybrid.config.run import RunConfig

_NONE = "-"


def describe(run: RunConfig) -> str:
    """The resolved configuration as JSON, a summary, and the rank map."""
    return "\n".join([run.to_json(), *_summary(run), "", *rank_map(run)]) + "\n"


def _summary(run: RunConfig) -> list[str]:
    grid = run.parallel
    return [
        f"model       {num_parameters(run.model):,} parameters in {run.precision}",
        f"world       {grid.world_size} ranks = pipeline {grid.pipeline_model_parallel_size} x data "
        f"{grid.data_parallel_size} x tensor {grid.tensor_model_parallel_size}"
        + (" with sequence parallelism" if grid.sequence_parallel else "")
        + (f", {run.hybrid.num_chunks} interleaved stages a rank" if run.hybrid.num_chunks > 1 else ""),
        f"batch       {run.global_batch_size} samples = {run.micro_batch_size} per microbatch x "
        f"{run.gradient_accumulation_steps} microbatches x data {grid.data_parallel_size}, "
        f"{run.tokens_per_step:,} tokens a step",
        f"optimizer   {run.optimizer_type}, ZeRO stage {run.zero_stage}, buckets of {run.reduce_bucket_size:,} "
        f"elements, gradients travel in {run.communication_dtype}",
    ]


def rank_map(run: RunConfig) -> list[str]:
    """A table with a row per (pipe, tensor) coordinate; data-parallel copies share a row.

    Ranks are numbered tensor innermost, then data, then pipe, as in DeepSpeed's topology.
    """
    grid = run.parallel
    tp, dp = grid.tensor_model_parallel_size, grid.data_parallel_size
    header = ["ranks", "pipe", "data", "tensor", "decoder layers", "also", "q heads", "kv heads", "vocabulary rows"]
    rows = [header]
    stages = stage_ranges(run.layers_per_stage)
    for pipe in range(grid.pipeline_model_parallel_size):
        held = [stages[s] for s in rank_stages(len(stages), grid.pipeline_model_parallel_size, pipe)]
        layers = ", ".join(_span(stage.start, stage.stop) for stage in held)
        ends = _ends(run, pipe)
        for tensor in range(tp):
            ranks = range(pipe * dp * tp + tensor, (pipe + 1) * dp * tp, tp)
            row = [_ranks(ranks), str(pipe), _span(0, dp), str(tensor), layers]
            rows.append([*row, ends or _NONE, *_heads(run, tensor), _vocabulary(run, tensor) if ends else _NONE])
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) <= 4:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"


def _span(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def _ends(run: RunConfig, pipe: int) -> str:
    """What the stage holds besides decoder layers."""
    last = run.parallel.pipeline_model_parallel_size - 1
    tied = " (tied)" if run.model.tie_word_embeddings else ""
    parts = ["embedding"] * (pipe == 0) + [f"norm, head{tied}"] * (pipe == last)
    return ", ".join(parts)


def _heads(run: RunConfig, tensor: int) -> tuple[str, str]:
    tp = run.parallel.tensor_model_parallel_size
    q = even_shard(run.model.num_attention_heads, tp, tensor)
    kv = kv_head_shard(run.model.num_key_value_heads, tp, tensor)
    replicated = f" (on {kv.replicas} ranks)" if kv.replicas > 1 else ""
    return _span(q.start, q.stop), _span(kv.start, kv.stop) + replicated


def _vocabulary(run: RunConfig, tensor: int) -> str:
    """Rows of the padded vocabulary, and how many of them are padding."""
    tp, size = run.parallel.tensor_model_parallel_size, run.model.vocab_size
    shard = even_shard(padded_vocab_size(size, tp), tp, tensor)
    padding = shard.length - max(0, min(shard.stop, size) - shard.start)
    return _span(shard.start, shard.stop) + (f" ({padding} padding)" if padding else "")
