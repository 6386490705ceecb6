"""Completions with a key/value cache, at any tensor and pipeline parallel layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.generate.sampling import Sampling, choose
from hybrid.generate.stages import receive_hidden, send_hidden, stage_rank, whole_sequences
from hybrid.grid import Grid
from hybrid.model.attention import Attention
from hybrid.model.block import TransformerBlock
from hybrid.model.cache import KVCache
from hybrid.model.head import vocab_parallel_logits
from hybrid.model.rope import Rope, rope_at, rope_tables
from hybrid.pipeline.module import LlamaPipeline


@dataclass(frozen=True)
class _Step:
    """The tokens of one pass: left-padded prompts, or one token each."""

    ids: Tensor
    """[b, s]."""
    rope: Rope
    mask: Tensor
    """[b, 1, s, tokens so far]."""


@torch.no_grad()
def generate(
    module: LlamaPipeline,
    grid: Grid,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    sampling: Sampling | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """The new tokens after each prompt, alike on every rank; the stop token, if one came, is the last of them.

    A collective call, the weights at rest; every rank gives the same arguments. Data-parallel replicas all do the same
    work.

    Raises:
        ValueError: there is no prompt, or one without a token.
    """
    if not prompts or not all(prompts):
        raise ValueError("every prompt needs at least one token to start from")
    training = module.training
    module.eval()
    attentions = [layer for layer in module.modules() if isinstance(layer, Attention)]
    longest = max(map(len, prompts))
    for attention in attentions:
        attention.cache = KVCache(longest + max_new_tokens)
    try:
        with whole_sequences(module):
            decoder = _Decoder(module, grid, prompts, longest + max_new_tokens)
            return decoder.run(max_new_tokens, stop_ids, sampling or Sampling(), torch.Generator().manual_seed(seed))
    finally:
        for attention in attentions:
            attention.cache = None
        module.train(training)


class _Decoder:
    """One batch of prompts on one rank."""

    def __init__(self, module: LlamaPipeline, grid: Grid, prompts: Sequence[Sequence[int]], length: int) -> None:
        self._module, self._grid = module, grid
        self._like = next(module.parameters())
        self._tables = rope_tables(module.config, length, self._like.device)
        self._dynamic = module.config.rope.rope_type == "dynamic"
        longest = max(map(len, prompts))
        # On the left, so that the last token of every prompt is in the last column.
        self._padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=self._like.device)
        rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        self._prompts = torch.tensor(rows, device=self._like.device)

    def run(
        self, max_new_tokens: int, stop_ids: frozenset[int], sampling: Sampling, generator: torch.Generator
    ) -> list[list[int]]:
        results: list[list[int]] = [[] for _ in self._prompts]
        finished = [False] * len(results)
        ids, start = self._prompts, 0
        for _ in range(max_new_tokens):
            chosen = self._next(self._step(ids, start), sampling, generator)
            start += ids.size(1)
            ids = chosen.unsqueeze(1)
            for row, token in enumerate(chosen.tolist()):
                if not finished[row]:
                    results[row].append(token)
                    finished[row] = token in stop_ids
            if all(finished):
                break
        return results

    def _step(self, ids: Tensor, start: int) -> _Step:
        columns = torch.arange(start + ids.size(1), device=ids.device)
        queries = columns[start:]
        positions = (queries.unsqueeze(0) - self._padding.unsqueeze(1)).clamp(min=0)  # [b, s]
        rope = rope_at(self._tables_of(columns.numel()), positions.t())
        seen = (columns >= self._padding.unsqueeze(1)).unsqueeze(1) & (columns <= queries.unsqueeze(1))
        # Padding sees itself: a softmax over nothing is not a number, and would spread.
        seen = seen | (columns == queries.unsqueeze(1))
        return _Step(ids, rope, seen.unsqueeze(1))

    def _tables_of(self, tokens: int) -> Rope:
        """RoPE tables for a pass that makes the longest sequence so long.

        As in transformers, dynamic frequencies are those of the tokens so far, and earlier keys keep the ones they
        were rotated with: what is still to come changes nothing.
        """
        return rope_tables(self._module.config, tokens, self._like.device) if self._dynamic else self._tables

    def _next(self, step: _Step, sampling: Sampling, generator: torch.Generator) -> Tensor:
        """The chosen tokens [b], on every rank of the pipeline."""
        grid, module = self._grid, self._module
        b, s = step.ids.shape
        x = step.ids if grid.is_first_stage else receive_hidden(grid, (s, b, module.config.hidden_size), self._like)
        for layer in module.forward_funcs:
            x = layer(x, step.rope, step.mask) if isinstance(layer, TransformerBlock) else layer(x)
        chosen = torch.empty(b, dtype=torch.int64, device=self._like.device)
        if grid.is_last_stage:
            hidden, weight = x
            chosen = choose(self._logits(hidden[-1:], weight), sampling, generator)
            if grid.tensor_group is not None:
                dist.broadcast(chosen, dist.get_global_rank(grid.tensor_group, 0), group=grid.tensor_group)
        else:
            send_hidden(grid, x)
        if grid.pipe_group is not None:
            last = grid.parallel.pipeline_model_parallel_size - 1
            dist.broadcast(chosen, stage_rank(grid, last), group=grid.pipe_group)
        return chosen

    def _logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """fp32 logits [b, V] of hidden states [1, b, h], gathered over the tensor-parallel ranks."""
        tp = self._module.tp
        local = vocab_parallel_logits(hidden, weight, tp)[0].float()
        parts = [local]
        if tp.group is not None:
            parts = [torch.empty_like(local) for _ in range(tp.size)]
            dist.all_gather(parts, local, group=tp.group)
        return torch.cat(parts, dim=-1)[:, : self._module.config.vocab_size]
