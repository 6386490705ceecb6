"""The layers stacked to a whole model, weights and gradients exchanged with Hugging Face through the ParamSpecs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybrid.config.model import LlamaConfig
from hybrid.model.block import Recompute, TransformerBlock
from hybrid.model.head import vocab_parallel_logits
from hybrid.model.norm import RMSNorm
from hybrid.model.rope import rope_tables
from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.embedding import VocabParallelEmbedding, vocab_parallel_weight
from hybrid.tensor_parallel.linear_cross_entropy import linear_cross_entropy
from hybrid.tensor_parallel.params import named_segments, param_spec


class Decoder(nn.Module):
    """Embedding, blocks, norm and head on one pipeline stage."""

    def __init__(
        self,
        config: LlamaConfig,
        tp: TensorParallel,
        dtype: torch.dtype = torch.float32,
        recompute: Recompute = "none",
    ) -> None:
        super().__init__()
        self.config, self.tp = config, tp
        v, h, eps = config.vocab_size, config.hidden_size, config.rms_norm_eps
        self.embed = VocabParallelEmbedding(v, h, name="model.embed_tokens", tp=tp, dtype=dtype, device="cpu")
        self.blocks = nn.ModuleList(
            TransformerBlock(config, i, tp=tp, dtype=dtype, device="cpu", recompute=recompute)
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(h, eps, name="model.norm", tp=tp, dtype=dtype, device="cpu")
        if config.tie_word_embeddings:
            self.head = self.embed.weight
        else:
            self.head = vocab_parallel_weight(v, h, name="lm_head", tp=tp, dtype=dtype, device="cpu")

    def hidden(self, ids: Tensor) -> Tensor:
        rope = rope_tables(self.config, ids.size(1), "cpu")
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, rope)
        return self.norm(x)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return linear_cross_entropy(self.hidden(ids), self.head, labels, vocab_size=self.config.vocab_size, tp=self.tp)

    def logits(self, ids: Tensor) -> Tensor:
        """This rank's columns, [b, s, V/t]."""
        return vocab_parallel_logits(self.hidden(ids), self.head, self.tp).transpose(0, 1)


@torch.no_grad()
def load_hf(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    for param in module.parameters():
        param.zero_()
    for param, segment in named_segments(module):
        assert tuple(state[segment.hf_name].shape) == segment.hf_shape, segment.hf_name
        param[segment.local] = state[segment.hf_name][segment.source].to(param)


@dataclass
class Piece:
    """One rank's part of a gradient, and whether the parts of ranks that hold the same rows add up."""

    source: tuple[slice, ...]
    shape: tuple[int, ...]
    value: Tensor
    adds_up: bool
    owner: bool


def gradient_pieces(module: nn.Module) -> dict[str, Piece]:
    pieces = {}
    for param, segment in named_segments(module):
        assert param.grad is not None, segment.hf_name
        pieces[segment.hf_name] = Piece(
            segment.source,
            segment.hf_shape,
            param.grad[segment.local].clone(),
            param_spec(param).sequence_partial or segment.partial,
            segment.shard.owner,
        )
    return pieces


def assemble(ranks: Sequence[Mapping[str, Piece]]) -> dict[str, Tensor]:
    """Whole Hugging Face gradients; parts that should be alike on all ranks are checked to be."""
    whole = {}
    for name in ranks[0]:
        full = torch.zeros(ranks[0][name].shape)
        for pieces in ranks:
            piece = pieces[name]
            if piece.adds_up or piece.owner:
                full[piece.source] += piece.value.float()
        for pieces in ranks:
            piece = pieces[name]
            if not piece.adds_up:
                assert torch.equal(full[piece.source], piece.value.float()), f"{name} differs between ranks"
        whole[name] = full
    return whole
