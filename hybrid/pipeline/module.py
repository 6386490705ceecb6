"""A LLaMA as DeepSpeed's PipelineModule: embedding, decoder blocks, final norm, head."""

from __future__ import annotations

import bisect
import contextlib
import functools
import io
from collections.abc import Callable, Sequence

import torch
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from hybrid.config.model import LlamaConfig
from hybrid.config.parallel import rank_stages, stage_ranges
from hybrid.grid import Grid
from hybrid.model.block import TransformerBlock
from hybrid.model.init import init_parameters
from hybrid.model.kernels import TORCH, Kernels
from hybrid.model.norm import RMSNorm
from hybrid.model.packing import Documents, document_rope, segment_rope
from hybrid.model.rope import Rope, rope_tables
from hybrid.pipeline.layers import HeadOutput, HeadPipe, tied_head
from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.embedding import VocabParallelEmbedding
from hybrid.tensor_parallel.linear_cross_entropy import linear_cross_entropy
from hybrid.tensor_parallel.random import RNGTracker

StageInput = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Token ids [b, s] or hidden states [s, b, h] (or [s/t, b, h]), alone or with segment numbers [b, s]."""

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"
FINAL_NORM = "model.norm"


class LlamaPipeline(PipelineModule):
    """This rank's stage of the model, or its several stages, in `dtype`, the weights drawn from `seed`.

    Args:
        config: the whole model.
        grid: this rank's place; the tensor-parallel group comes from it.
        layers_per_stage: decoder blocks of each stage; the stages are dealt out to the pipeline's ranks in turn.
        recompute: granularity of the decoder blocks that recompute, `none`, `selective` or `full`.
        recompute_layers: how many blocks of each rank do so, its first ones; None for all.
        seed: of the initial weights and of dropout.
        kernels: the operators of norms and MLPs.
    """

    def __init__(
        self,
        config: LlamaConfig,
        grid: Grid,
        *,
        layers_per_stage: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        recompute: str = "none",
        recompute_layers: int | None = None,
        kernels: Kernels = TORCH,
    ) -> None:
        self.config = config
        dropout = config.attention_dropout > 0
        self.tp = TensorParallel(
            group=grid.tensor_group,
            rank=grid.tensor_rank,
            size=grid.parallel.tensor_model_parallel_size,
            sequence_parallel=grid.parallel.sequence_parallel,
            rng=RNGTracker.for_rank(seed, grid.rank, device) if dropout else None,
        )
        ranks = grid.parallel.pipeline_model_parallel_size
        self._blocks = stage_ranges(layers_per_stage)
        self._stages = rank_stages(len(self._blocks), ranks, grid.pipe_rank)
        recomputing = None if recompute_layers is None else _first_blocks(self._blocks, ranks, recompute_layers)
        self.before_layer: Callable[[int], None] = lambda layer: None
        # Made anew only when the length changes.
        self._rope = functools.lru_cache(maxsize=1)(functools.partial(rope_tables, config))
        specs = self._specs(dtype, device, recompute, recomputing, kernels)
        # DeepSpeed prints the partition, which the run's banner says, and broadcasts tied weights under autograd, which
        # would warn of it in the first backward.
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            super().__init__(layers=specs, topology=grid.topology, loss_fn=self._loss, partition_method="explicit")
        init_parameters(self, seed, config.initializer_range)

    def _specs(
        self,
        dtype: torch.dtype,
        device: torch.device,
        recompute: str,
        recomputing: frozenset[int] | None,
        kernels: Kernels,
    ) -> list[LayerSpec]:
        """Every layer of the model; the decoder blocks in `recomputing`, None for all, get that granularity."""
        config, tp = self.config, self.tp
        common = {"tp": tp, "dtype": dtype, "device": device}
        vocab = (config.vocab_size, config.hidden_size)
        blocks = []
        for index in range(config.num_hidden_layers):
            granularity = recompute if recomputing is None or index in recomputing else "none"
            options = {"recompute": granularity, "kernels": kernels, **common}
            blocks.append(LayerSpec(TransformerBlock, config, index, **options))
        norm = LayerSpec(
            RMSNorm, config.hidden_size, config.rms_norm_eps, name=FINAL_NORM, operator=kernels.rms_norm, **common
        )
        if not config.tie_word_embeddings:
            embedding = LayerSpec(VocabParallelEmbedding, *vocab, name=EMBEDDING, **common)
            return [embedding, *blocks, norm, LayerSpec(HeadPipe, *vocab, name=HEAD, **common)]
        tied = {"name": EMBEDDING, "tied": True, **common}
        first = TiedLayerSpec("embedding", VocabParallelEmbedding, *vocab, **tied)
        last = TiedLayerSpec("embedding", VocabParallelEmbedding, *vocab, forward_fn=tied_head, **tied)
        return [first, *blocks, norm, last]

    def _partition_layers(self, method: str = "explicit") -> None:
        """The explicit split, in pipeline layers: the embedding goes first, norm and head last."""
        stops = [1 + stage.stop for stage in self._blocks]
        self.parts = [0, *stops[:-1], stops[-1] + 2]

    def _build(self) -> None:
        """Build the layers of this rank's stages, one after the other."""
        self.chunks: list[range] = []
        """Of each stage of this rank, in the order of the model: where its layers are in `forward_funcs`."""
        for stage in self._stages:
            first = len(self.forward_funcs)
            self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])
            super()._build()
            self.chunks.append(range(first, len(self.forward_funcs)))

    def stage_owner(self, layer_idx: int) -> int:
        """The pipeline rank that holds a pipeline layer."""
        return (bisect.bisect_right(self.parts, layer_idx) - 1) % int(self.num_stages)

    def _loss(self, outputs: HeadOutput, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(summed loss in fp32, supervised tokens) of labels [b, s], already shifted."""
        hidden, weight = outputs
        return linear_cross_entropy(hidden, weight, labels, vocab_size=self.config.vocab_size, tp=self.tp)

    def forward(self, inputs: StageInput, chunk: int = 0) -> StageInput | HeadOutput:
        """Run a stage of this rank: token ids [b, s] or hidden states in, hidden states or (those, head weight) out.

        With packed documents the segment numbers [b, s] travel beside the hidden states, and each stage finds in them
        positions and documents: nothing larger crosses.
        """
        x, segments = inputs if isinstance(inputs, tuple) else (inputs, None)
        rope, documents = self._positions(x, segments)
        output: torch.Tensor | HeadOutput = x
        for index in self.chunks[chunk]:
            self.before_layer(index)
            layer = self.forward_funcs[index]
            output = layer(output, rope, documents) if isinstance(layer, TransformerBlock) else layer(output)
        if segments is None or isinstance(output, tuple):
            return output
        return output, segments

    def _positions(self, x: torch.Tensor, segments: torch.Tensor | None) -> tuple[Rope, Documents | None]:
        """RoPE tables, and the documents where there are several in a row."""
        if segments is not None:
            documents = Documents.of(segments)
            if self.config.rope.rope_type == "dynamic":  # its frequencies are those of a document's own length
                rope = document_rope(lambda length: rope_tables(self.config, length, x.device), documents)
            else:
                rope = segment_rope(self._rope(segments.size(1), x.device), segments)
            return rope, documents if documents.several else None
        if not x.is_floating_point():
            return self._rope(x.size(1), x.device), None
        return self._rope(x.size(0) * (self.tp.size if self.tp.sequence_sharded else 1), x.device), None

    def parameters_by_layer(self) -> list[list[tuple[str, nn.Parameter]]]:
        """(name, parameter) of each layer of this rank in forward order; a shared one at its first use."""
        seen: set[int] = set()
        layers = []
        for func in self.forward_funcs:
            # A tied head is a partial of `tied_head` over the embedding it shares.
            module = func if isinstance(func, nn.Module) else func.args[0]
            fresh = [(name, param) for name, param in module.named_parameters() if id(param) not in seen]
            seen.update(id(param) for _, param in fresh)
            layers.append(fresh)
        return layers


def _first_blocks(blocks: Sequence[range], ranks: int, count: int) -> frozenset[int]:
    """Indices of the first `count` decoder blocks of each rank, whose stages have these `blocks`."""
    held = ([index for stage in blocks[rank::ranks] for index in stage] for rank in range(ranks))
    return frozenset(index for indices in held for index in indices[:count])
