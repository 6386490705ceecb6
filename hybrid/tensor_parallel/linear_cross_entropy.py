"""Output projection and cross-entropy in one.

The loss is wanted, not the logits: they are the largest tensor of a training step, T V numbers for T tokens, where the
projection's fp32 gradient is V h. So they are held whole, until backward, where they are the smaller of the two; and
else chunk by chunk, with both gradients made at once and no projection computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hybrid.config.parallel import Shard
from hybrid.tensor_parallel.chunks import default_chunk_tokens, keeps_logits
from hybrid.tensor_parallel.collectives import (
    all_gather,
    all_reduce,
    reduce_scatter,
    start_all_reduce,
    start_reduce_scatter,
)
from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.cross_entropy import IGNORE_INDEX, Targets, exp_and_loss_, to_gradient_
from hybrid.tensor_parallel.embedding import vocab_shard
from hybrid.tensor_parallel.linear import weight_gradient
from hybrid.tensor_parallel.params import gradient_sink


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
        parts = (slice(begin, begin + chunk_tokens) for begin in range(0, labels.size(0), chunk_tokens))
        return torch.stack([self._chunk(part, labels[part], shard, tp) for part in parts]).sum()

    def _chunk(self, part: slice, labels: Tensor, shard: Shard, tp: TensorParallel) -> Tensor:
        """The sum of a chunk's losses. Its logits end with the call: those of the next are not made beside them."""
        columns = self.weight.size(0)
        logits = (self.hidden[part] @ self.weight.t()).float()
        targets = Targets(labels, tp.rank * columns, columns)
        loss, total = exp_and_loss_(logits, targets, shard, tp)
        if self.grad_hidden is not None or self._need_weight:
            to_gradient_(logits, total, targets)
            self._accumulate(part, logits.to(self.weight.dtype))
        return loss.sum()

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


def _scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """An fp32 `x` is written over."""
    # In fp32: torch would round a 0-d factor such as 1 / tokens to the tensor's half precision.
    return x.float().mul_(scale).to(dtype)


def _taken(kept: Any) -> Any:
    """What a forward has kept for its one backward, which may write over it: no copy is made."""
    if kept is None:
        raise RuntimeError("linear_cross_entropy hands out its gradients once: it has no second backward")
    return kept


class _ByChunks(Function):
    """Both gradients in forward, that of the hidden states summed over the ranks; backward multiplies by the scale."""

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
        rows = full.flatten(0, -2)
        chunks = _ChunkedLoss(rows, weight, need_hidden=need_hidden, need_weight=need_weight)
        chunk_tokens = chunk_tokens or default_chunk_tokens(rows.size(0), weight.size(0))
        loss = chunks.run(labels, vocab_size, tp, chunk_tokens)
        grad_hidden = chunks.grad_hidden
        if grad_hidden is not None:
            reduce = reduce_scatter if tp.sequence_sharded else all_reduce
            grad_hidden = reduce(grad_hidden.view_as(full), tp.group)
        # Not save_for_backward: a saved tensor could not be scaled in place, nor become the parameter's .grad uncopied.
        ctx.grads, ctx.dtypes = (grad_hidden, chunks.grad_weight), (hidden.dtype, weight.dtype)
        return loss

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = _taken(ctx.grads), None
        scaled = [None if g is None else _scaled(g, scale, dtype) for g, dtype in zip(grads, ctx.dtypes, strict=True)]
        return scaled[0], scaled[1], None, None, None, None, None


class _AtOnce(Function):
    """The logits' exponentials wait in fp32 for backward, which turns them into both gradients.

    The sum of the hidden gradient over the ranks runs behind the GEMM of the weight's, whose product may go straight to
    where gradients are summed. The gathered hidden states are kept: they are small beside the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int, tp: TensorParallel
    ) -> Tensor:
        full = all_gather(hidden, tp.group) if tp.sequence_sharded else hidden
        columns = weight.size(0)
        logits = (full.flatten(0, -2) @ weight.t()).float()
        targets = Targets(labels, tp.rank * columns, columns)
        loss, total = exp_and_loss_(logits, targets, vocab_shard(vocab_size, tp.size, tp.rank), tp)
        ctx.save_for_backward(full, weight)
        ctx.tp, ctx.sink, ctx.logits = tp, gradient_sink(weight), (logits, total, targets)
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        (exponentials, total, targets), ctx.logits = _taken(ctx.logits), None
        to_gradient_(exponentials, total, targets)
        full, weight = ctx.saved_tensors
        tp: TensorParallel = ctx.tp
        grad = exponentials.to(weight.dtype)
        del exponentials  # as large again, while both products run
        # The scale meets the smaller factor: at the logits it would be rounded alike for every label whose gradient is
        # about -1, a bias of up to 0.4% in bf16.
        reduction = None
        if ctx.needs_input_grad[0]:
            start = start_reduce_scatter if tp.sequence_sharded else start_all_reduce
            reduction = start(_scaled(grad @ weight, scale, full.dtype).view_as(full), tp.group)
        inputs = _scaled(full.to(torch.float32, copy=True), scale, full.dtype)
        grad_weight = weight_gradient(grad, inputs, ctx.sink)
        return reduction() if reduction is not None else None, grad_weight, None, None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    tp: TensorParallel,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum of the losses of all tokens under the logits hidden weight^T.

    Args:
        hidden: [s, b, h], or [s/t, b, h] under sequence parallelism.
        weight: this rank's rows [V/t, h] of the padded output head.
        labels: [b, s], already shifted; `IGNORE_INDEX` where not supervised.
        chunk_tokens: tokens whose logits are held at a time; by default all where `keeps_logits` says so, else see
            `default_chunk_tokens`.

    Returns:
        The sum of the supervised tokens' losses, an fp32 scalar, and their number, an int64 scalar; the same on every
        tensor-parallel rank. The loss has one backward.

    Forward: under sequence parallelism an all-gather of the hidden states, then two small all-reduces, or two for each
    chunk. The gradient of the hidden states is summed over the ranks once, by an all-reduce or a reduce-scatter: in
    backward behind a GEMM, or where chunks are made, in forward. No GEMM is run twice.
    """
    grad_enabled = torch.is_grad_enabled()  # inside a Function it always reads false
    tokens = labels.t().flatten()
    if chunk_tokens is None and grad_enabled and weight.requires_grad and keeps_logits(len(tokens), weight.size(1)):
        loss: Tensor = _AtOnce.apply(hidden, weight, tokens, vocab_size, tp)
    else:
        loss = _ByChunks.apply(hidden, weight, tokens, vocab_size, tp, chunk_tokens, grad_enabled)
    return loss, (labels != IGNORE_INDEX).sum()
