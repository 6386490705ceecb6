"""Cross-entropy over a vocabulary cut over the tensor-parallel ranks; alone, or fused with the output projection.

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
from hybrid.tensor_parallel.chunks import default_chunk_tokens
from hybrid.tensor_parallel.collectives import all_gather, all_reduce, all_reduce_max, reduce_scatter
from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.embedding import vocab_shard

IGNORE_INDEX = -100
"""Label of a position that is not supervised, as everywhere in torch and Hugging Face."""


class _Targets:
    """Where the labels [n] are on a rank whose columns begin at `start`; each field is [n, 1]."""

    def __init__(self, labels: Tensor, start: int, columns: int) -> None:
        labels = labels.unsqueeze(1)
        local = labels - start
        self.column = local.clamp(0, columns - 1)
        """Any, of a label that is not here."""
        self.elsewhere = self.column != local
        self.ignored = labels == IGNORE_INDEX


def _exp_and_loss_(logits: Tensor, targets: _Targets, shard: Shard, tp: TensorParallel) -> tuple[Tensor, Tensor]:
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


def _to_gradient_(exponentials: Tensor, total: Tensor, targets: _Targets, scale: Tensor | None = None) -> None:
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
        loss, total = _exp_and_loss_(flat, _Targets(labels.flatten(), ctx.start, columns), shard, tp)
        ctx.save_for_backward(flat, total, labels.flatten())
        return loss.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        exponentials, total, labels = ctx.saved_tensors
        grad_logits = exponentials.clone()
        targets = _Targets(labels, ctx.start, exponentials.size(1))
        _to_gradient_(grad_logits, total, targets, grad.reshape(-1, 1))
        return grad_logits.view(ctx.shape).to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, *, vocab_size: int, tp: TensorParallel) -> Tensor:
    """Loss of each token, fp32, shaped like `labels`; 0 where the label is `IGNORE_INDEX`.

    `logits` [..., V/t] are this rank's columns of the padded vocabulary; padding counts for nothing. Forward: two
    all-reduces, of one and two numbers per token. Backward: nothing; each rank gets the gradient of its columns.
    """
    result: Tensor = _VocabParallelCrossEntropy.apply(logits, labels, vocab_size, tp)
    return result


class _ChunkedLoss:
    """One pass over the tokens: loss and gradients, chunk by chunk, so that the projection is computed once.

    The weight's gradient is summed over the chunks in fp32: a bf16 sum would lose the later chunks' low bits, and the
    buffer (4 bytes a weight) does not grow with the tokens. The hidden gradient is written once, in its own dtype.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, *, need_hidden: bool, need_weight: bool) -> None:
        self.hidden, self.weight = hidden, weight  # [n, h], [V/t, h]
        self.grad_hidden = torch.empty_like(hidden) if need_hidden else None
        self.grad_weight: Tensor | None = None
        self._need_weight = need_weight

    def run(self, labels: Tensor, vocab_size: int, tp: TensorParallel, chunk_tokens: int) -> Tensor:
        """Sum of the losses of `labels` [n], an fp32 scalar."""
        shard = vocab_shard(vocab_size, tp.size, tp.rank)
        columns = self.weight.size(0)
        losses = []
        for begin in range(0, labels.size(0), chunk_tokens):
            part = slice(begin, begin + chunk_tokens)
            logits = (self.hidden[part] @ self.weight.t()).float()
            targets = _Targets(labels[part], tp.rank * columns, columns)
            loss, total = _exp_and_loss_(logits, targets, shard, tp)
            losses.append(loss.sum())
            if self.grad_hidden is not None or self._need_weight:
                _to_gradient_(logits, total, targets)
                self._accumulate(part, logits.to(self.weight.dtype))
        return torch.stack(losses).sum()

    def _accumulate(self, part: slice, grad_logits: Tensor) -> None:
        if self.grad_hidden is not None:
            torch.mm(grad_logits, self.weight, out=self.grad_hidden[part])
        if not self._need_weight:
            return
        left, right = grad_logits.t(), self.hidden[part]
        if self.grad_weight is None:
            self.grad_weight = (left @ right).float()
        elif left.dtype == self.grad_weight.dtype:
            self.grad_weight.addmm_(left, right)
        else:
            self.grad_weight += left @ right


def _scaled(grad: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    # In fp32: torch would round a 0-d factor such as 1 / tokens to the gradient's half precision.
    return grad.float().mul_(scale).to(dtype)


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocab_size: int,
        tp: TensorParallel,
        chunk_tokens: int | None,
        grad_enabled: bool,
    ) -> Tensor:
        full = all_gather(hidden, tp.group) if tp.sequence_sharded else hidden
        need_hidden, need_weight = (grad_enabled and need for need in ctx.needs_input_grad[:2])
        rows = full.reshape(-1, full.size(-1))
        chunks = _ChunkedLoss(rows, weight, need_hidden=need_hidden, need_weight=need_weight)
        chunk_tokens = chunk_tokens or default_chunk_tokens(rows.size(0), weight.size(0))
        loss = chunks.run(labels.t().flatten(), vocab_size, tp, chunk_tokens)
        grad_hidden = chunks.grad_hidden
        if grad_hidden is not None:
            reduce = reduce_scatter if tp.sequence_sharded else all_reduce
            grad_hidden = reduce(grad_hidden.view_as(full), tp.group)
        # Not save_for_backward: a saved tensor could not be scaled in place, nor become the parameter's .grad uncopied.
        ctx.grads, ctx.dtypes = (grad_hidden, chunks.grad_weight), (hidden.dtype, weight.dtype)
        return loss

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("linear_cross_entropy hands out its gradients once: it has no second backward")
        grads, ctx.grads = ctx.grads, None
        scaled = [None if g is None else _scaled(g, scale, dtype) for g, dtype in zip(grads, ctx.dtypes, strict=True)]
        return scaled[0], scaled[1], None, None, None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    tp: TensorParallel,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output projection and cross-entropy in one, without ever holding the logits of all tokens.

    Args:
        hidden: [s, b, h], or [s/t, b, h] under sequence parallelism.
        weight: this rank's rows [V/t, h] of the padded output head.
        labels: [b, s], already shifted; `IGNORE_INDEX` where not supervised.
        chunk_tokens: tokens whose logits are held at a time; by default see `default_chunk_tokens`.

    Returns:
        The sum of the supervised tokens' losses, an fp32 scalar, and their number, an int64 scalar; the same on every
        tensor-parallel rank.

    Forward: under sequence parallelism an all-gather of the hidden states, then two small all-reduces per chunk; the
    gradients are made there too (so no GEMM is run twice), and that of the hidden states is summed over the ranks, by
    an all-reduce or a reduce-scatter. Backward: one multiplication by the incoming scalar.
    """
    grad_enabled = torch.is_grad_enabled()  # inside a Function it always reads false
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, labels, vocab_size, tp, chunk_tokens, grad_enabled)
    return loss, (labels != IGNORE_INDEX).sum()
