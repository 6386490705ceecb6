"""Vocabulary-parallel cross-entropy and the fused linear one against torch, and the memory of the latter."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.pool import WorkerPool
from tensor_parallel.meters import Events, LiveStorage

from hybrid.config.parallel import padded_vocab_size
from hybrid.tensor_parallel.chunks import default_chunk_tokens
from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.cross_entropy import IGNORE_INDEX, vocab_parallel_cross_entropy
from hybrid.tensor_parallel.embedding import vocab_shard
from hybrid.tensor_parallel.linear_cross_entropy import linear_cross_entropy
from hybrid.tensor_parallel.params import set_gradient_sink

VOCAB, B, S = 131, 3, 8
NARROW, WIDE = B * S - 1, B * S
"""Hidden sizes: more tokens than this, whose logits are made chunk by chunk, and as many, whose logits are kept."""
sizes = pytest.mark.parametrize("hidden_size", [NARROW, WIDE])


def _inputs(hidden_size: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [s, b, h], head [V, h], labels [b, s]."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(S, B, hidden_size, generator=generator)
    head = torch.randn(VOCAB, hidden_size, generator=generator)
    labels = torch.randint(0, VOCAB, (B, S), generator=generator)
    labels[0, :5] = IGNORE_INDEX
    labels[1, :3] = torch.tensor([0, 127, 130])
    return hidden.to(dtype), head.to(dtype), labels


def _local(head: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """This rank's rows, padding filled with what must never be seen."""
    rows = padded_vocab_size(VOCAB, tp.size) // tp.size
    shard = vocab_shard(VOCAB, tp.size, tp.rank)
    local = head.new_full((rows, head.size(1)), 9.0)
    local[: shard.length] = head[shard.start : shard.stop]
    return local


def _twin(hidden_size: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, head, labels = _inputs(hidden_size)
    hidden.requires_grad_()
    head.requires_grad_()
    losses = F.cross_entropy(
        (hidden @ head.t()).flatten(0, 1), labels.t().flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    (losses.sum() * scale).backward()
    return losses.detach().view(S, B), hidden.grad, head.grad


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # fp32 sums over the vocabulary or the tokens, in another order.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def _per_token_matches() -> None:
    tp = TensorParallel.over(dist.group.WORLD)
    hidden, head, labels = _inputs(NARROW)
    losses, _, _ = _twin(NARROW)
    logits = (hidden @ _local(head, tp).t()).requires_grad_()
    before = logits.detach().clone()
    weights = torch.rand(S, B, generator=torch.Generator().manual_seed(3))
    ours = vocab_parallel_cross_entropy(logits, labels.t(), vocab_size=VOCAB, tp=tp)
    assert ours.dtype == torch.float32
    _close(ours, losses)
    ours.backward(weights)
    assert torch.equal(logits.detach(), before)

    twin_logits = (hidden @ head.t()).requires_grad_()
    twin = F.cross_entropy(twin_logits.flatten(0, 1), labels.t().flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    twin.backward(weights.flatten())
    shard = vocab_shard(VOCAB, tp.size, tp.rank)
    _close(logits.grad[..., : shard.length], twin_logits.grad[..., shard.start : shard.stop])
    assert not logits.grad[..., shard.length :].any()


def _fused_matches(sequence_parallel: bool, hidden_size: int, chunk_tokens: int | None) -> list[str]:
    tp = TensorParallel.over(dist.group.WORLD, sequence_parallel=sequence_parallel)
    scale = 1 / 19
    hidden, head, labels = _inputs(hidden_size)
    losses, hidden_grad, head_grad = _twin(hidden_size, scale)
    part = slice(None)
    if tp.sequence_sharded:
        part = slice(tp.rank * S // tp.size, (tp.rank + 1) * S // tp.size)
    x = hidden[part].clone().requires_grad_()
    weight = _local(head, tp).requires_grad_()
    with Events() as events:
        loss, count = linear_cross_entropy(x, weight, labels, vocab_size=VOCAB, tp=tp, chunk_tokens=chunk_tokens)
        (loss * scale).backward()
    assert count == (labels != IGNORE_INDEX).sum() and loss.dtype == torch.float32 and loss.dim() == 0
    _close(loss, losses.sum())
    _close(x.grad, hidden_grad[part])
    shard = vocab_shard(VOCAB, tp.size, tp.rank)
    _close(weight.grad[: shard.length], head_grad[shard.start : shard.stop])
    assert not weight.grad[shard.length :].any()
    return [name for name in events.names if name != "gemm"]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_per_token_loss(pool: WorkerPool, world: int) -> None:
    pool.run(_per_token_matches, world)


worlds = pytest.mark.parametrize(("world", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, True)])


@pytest.mark.parametrize("chunk_tokens", [None, 1, 7, 1000])
@worlds
def test_loss_by_chunks(pool: WorkerPool, world: int, sequence_parallel: bool, chunk_tokens: int | None) -> None:
    for names in pool.run(_fused_matches, world, sequence_parallel, NARROW, chunk_tokens):
        chunks = -(-S * B // (chunk_tokens or S * B // 2))
        expected = ["all_reduce"] * 2 * chunks  # MAX and SUM
        expected = ["all_gather", *expected, "reduce_scatter"] if sequence_parallel else [*expected, "all_reduce"]
        assert names == (expected if world > 1 else [])


@worlds
def test_loss_of_kept_logits(pool: WorkerPool, world: int, sequence_parallel: bool) -> None:
    for names in pool.run(_fused_matches, world, sequence_parallel, WIDE, None):
        expected = ["all_reduce"] * 2
        expected = ["all_gather", *expected, "reduce_scatter"] if sequence_parallel else [*expected, "all_reduce"]
        assert names == (expected if world > 1 else [])


def test_weight_gradient_goes_to_its_sink() -> None:
    tp = TensorParallel.single()
    hidden, head, labels = _inputs(WIDE)
    _, _, head_grad = _twin(WIDE)
    weight, received = _local(head, tp).requires_grad_(), []

    def sink(left: torch.Tensor, right: torch.Tensor) -> bool:
        received.append(left @ right)
        return True

    set_gradient_sink(weight, sink)
    loss, _ = linear_cross_entropy(hidden.requires_grad_(), weight, labels, vocab_size=VOCAB, tp=tp)
    loss.backward()
    assert weight.grad is None and len(received) == 1
    _close(received[0][:VOCAB], head_grad)


@pytest.mark.parametrize(
    ("train_hidden", "train_head", "hidden_size", "chunk_tokens"),
    [(True, False, NARROW, 100), (True, False, WIDE, 100), (False, True, NARROW, 100), (False, True, WIDE, None)],
)
def test_frozen_head_and_frozen_trunk(
    train_hidden: bool, train_head: bool, hidden_size: int, chunk_tokens: int | None
) -> None:
    tp = TensorParallel.single()
    hidden, head, labels = _inputs(hidden_size)
    _, hidden_grad, head_grad = _twin(hidden_size)
    x, w = hidden.clone().requires_grad_(train_hidden), _local(head, tp).requires_grad_(train_head)
    with Events() as events:
        loss, _ = linear_cross_entropy(x, w, labels, vocab_size=VOCAB, tp=tp, chunk_tokens=chunk_tokens)
        loss.backward()
    assert events.count("gemm") == 2
    assert (x.grad is not None) == train_hidden and (w.grad is not None) == train_head
    if train_hidden:
        _close(x.grad, hidden_grad)
    else:
        _close(w.grad[:VOCAB], head_grad)


def test_no_gradient_work_without_grad_mode() -> None:
    tp = TensorParallel.single()
    hidden, head, labels = _inputs(WIDE)
    with torch.no_grad(), Events() as events:
        loss, _ = linear_cross_entropy(
            hidden.requires_grad_(),
            _local(head, tp).requires_grad_(),
            labels,
            vocab_size=VOCAB,
            tp=tp,
            chunk_tokens=100,
        )
    assert not loss.requires_grad and events.count("gemm") == 1


@sizes
def test_second_backward_is_refused(hidden_size: int) -> None:
    tp = TensorParallel.single()
    hidden, head, labels = _inputs(hidden_size)
    loss, _ = linear_cross_entropy(hidden.requires_grad_(), _local(head, tp), labels, vocab_size=VOCAB, tp=tp)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()


@sizes
def test_nothing_supervised(hidden_size: int) -> None:
    tp = TensorParallel.single()
    hidden, head, labels = _inputs(hidden_size)
    x = hidden.requires_grad_()
    labels.fill_(IGNORE_INDEX)
    loss, count = linear_cross_entropy(x, _local(head, tp), labels, vocab_size=VOCAB, tp=tp)
    loss.backward()
    assert loss == 0 and count == 0 and not x.grad.any()


@sizes
def test_extreme_logits_stay_finite(hidden_size: int) -> None:
    tp = TensorParallel.single()
    hidden, head, labels = _inputs(hidden_size)
    x = (hidden * 1e4).requires_grad_()
    loss, _ = linear_cross_entropy(x, _local(head, tp), labels, vocab_size=VOCAB, tp=tp)
    loss.backward()
    assert loss.isfinite() and x.grad.isfinite().all()


def test_half_precision_is_close() -> None:
    tp = TensorParallel.single()
    hidden, head, labels = _inputs(NARROW, torch.bfloat16)
    exact, _ = linear_cross_entropy(hidden.float(), _local(head.float(), tp), labels, vocab_size=VOCAB, tp=tp)
    loss, _ = linear_cross_entropy(hidden, _local(head, tp), labels, vocab_size=VOCAB, tp=tp, chunk_tokens=1)
    torch.testing.assert_close(loss, exact, rtol=2e-2, atol=0.0)  # the logits are rounded to bf16


@sizes
def test_half_precision_gradients_are_scaled_in_fp32(hidden_size: int) -> None:
    tp = TensorParallel.single()
    grads = []
    scale = 1.5039  # halfway between two bf16 numbers: rounded, it would be off by 0.26%
    for factor in (1.0, scale):
        hidden, head, labels = _inputs(hidden_size, torch.bfloat16)
        x, w = hidden.requires_grad_(), _local(head, tp).requires_grad_()
        loss, _ = linear_cross_entropy(x, w, labels, vocab_size=VOCAB, tp=tp)
        (loss * factor).backward()
        assert x.grad.dtype == w.grad.dtype == torch.bfloat16
        grads.append(torch.cat((x.grad.flatten(), w.grad.flatten())).float())
    # The rounding of single entries averages out, a wrong scale does not.
    ratio = (grads[1] @ grads[0] / (grads[0] @ grads[0])).item()
    assert ratio == pytest.approx(scale, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1024, 2048])
def test_peak_memory_is_below_an_eighth_of_the_logits(tokens: int, dtype: torch.dtype) -> None:
    vocab, hidden_size = 128256, 16
    tp = TensorParallel.single()
    x = torch.randn(tokens, 1, hidden_size, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, hidden_size, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocab, (1, tokens))
    with LiveStorage(outside=(x, weight)) as live:
        loss, count = linear_cross_entropy(x, weight, labels, vocab_size=vocab, tp=tp)
        (loss / count).backward()
    # One chunk's logits are a sixteenth, in bf16 with a half of that beside; two chunks' would be too much.
    assert 0 < live.peak < tokens * vocab * 4 / 8


@pytest.mark.parametrize(
    ("tokens", "columns", "chunk"),
    [
        (1024, 128256, 64),  # a sixteenth
        (65536, 128256, 523),  # 256 MiB
        (512, 8192, 256),  # 8 MiB
        (24, 256, 12),  # half
        (1, 128, 1),
        (1, 10**9, 1),
    ],
)
def test_default_chunk(tokens: int, columns: int, chunk: int) -> None:
    assert default_chunk_tokens(tokens, columns) == chunk
