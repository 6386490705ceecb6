"""Cross-entropy over a vocabulary cut over the tensor-parallel ranks.

With logits z, the loss of a token with label y is log(sum_j exp z_j) - z_y, its gradient softmax(z)_j - [j = y].
Each rank holds the columns of its vocabulary rows. A token costs one maximum and two sums over the ranks (Megatron-LM,
Shoeybi et al. 2019, section 3), instead of a gather of the logits. All of it is fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hybrid.config.parallel import Shard
from hybrid.tensor_parallel.collectives import all_reduce, all_reduce_max
from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.embedding import vocab_shard

IGNORE_INDEX = -100
"""Label of a position that is not supervised, as everywhere in torch and Hugging Face."""


class Targets:
    """Where the labels [n] are on a rank whose columns begin at `start`; each field is [n, 1]."""

    def __init__(self, labels: Tensor, start: int, columns: int) -> None:
        labels = labels.unsqueeze(1)
        local = labels - start
        self.column = local.clamp(0, columns - 1)
        """Any, of a label that is not here."""
        self.elsewhere = self.column != local
        self.ignored = labels == IGNORE_INDEX


def exp_and_loss_(logits: Tensor, targets: Targets, shard: Shard, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """Per-token loss [n, 1], 0 where ignored, and the softmax's denominator [n, 1].

    `logits` [n, V/t], fp32, become their exponentials in place. One MAX and one SUM all-reduce of n and 2 n numbers.
    """
    if shard.length < logits.size(1):
        logits[:, shard.length :] = -torch.inf  # padding is no part of the vocabulary
    logits.sub_(all_reduce_max(logits.amax(dim=1, keepdim=True), tp.group))
    target = logits.gather(1, targets.column).masked_fill_(targets.elsewhere, 0.0)
    logits.exp_()
    total, target = all_reduce(torch.stack((logits.sum(dim=1, keepdim=True), target)), tp.group)
    return (total.log() - target).masked_fill_(targets.ignored, 0.0), total


def to_gradient_(exponentials: Tensor, total: Tensor, targets: Targets, scale: Tensor | None = None) -> None:
    """Turn exponentials [n, V/t] into d loss / d logits, in place; rows of ignored labels become 0.

    `total` and `scale`, by default 1, are [n, 1].
    """
    weight = (torch.ones_like(total) if scale is None else scale).masked_fill(targets.ignored, 0.0)
    exponentials.mul_(weight / total)
    at_label = exponentials.gather(1, targets.column) - weight.masked_fill_(targets.elsewhere, 0.0)
    exponentials.scatter_(1, targets.column, at_label)


class _VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, tp: TensorParallel) -> Tensor:
        columns = logits.size(-1)
        ctx.start, ctx.shape, ctx.dtype = tp.rank * columns, logits.shape, logits.dtype
        flat = logits.to(torch.float32, copy=True).view(-1, columns)
        shard = vocab_shard(vocab_size, tp.size, tp.rank)
        loss, total = exp_and_loss_(flat, Targets(labels.flatten(), ctx.start, columns), shard, tp)
        ctx.save_for_backward(flat, total, labels.flatten())
        return loss.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        exponentials, total, labels = ctx.saved_tensors
        grad_logits = exponentials.clone()
        targets = Targets(labels, ctx.start, exponentials.size(1))
        to_gradient_(grad_logits, total, targets, grad.reshape(-1, 1))
        return grad_logits.view(ctx.shape).to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, *, vocab_size: int, tp: TensorParallel) -> Tensor:
    """Loss of each token, fp32, shaped like `labels`; 0 where the label is `IGNORE_INDEX`.

    `logits` [..., V/t] are this rank's columns of the padded vocabulary; padding counts for nothing. Forward: two
    all-reduces, of one and two numbers per token. Backward: nothing; each rank gets the gradient of its columns.
    """
    result: Tensor = _VocabParallelCrossEntropy.apply(logits, labels, vocab_size, tp)
    return result
