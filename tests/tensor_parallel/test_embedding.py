"""The vocabulary-parallel embedding against a table lookup, with padding rows and repeated ids."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.pool import WorkerPool
from tensor_parallel.meters import Events

from hybrid.config.parallel import padded_vocab_size
from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.embedding import VocabParallelEmbedding, vocab_shard
from hybrid.tensor_parallel.params import param_spec

VOCAB, HIDDEN, B, S = 131, 6, 3, 8


def _embedding(tp: TensorParallel, table: torch.Tensor, dtype: torch.dtype = torch.float32) -> VocabParallelEmbedding:
    layer = VocabParallelEmbedding(*table.shape, name="model.embed_tokens", tp=tp, dtype=dtype, device="cpu")
    with torch.no_grad():
        layer.weight.zero_()
        (segment,) = param_spec(layer.weight).segments
        layer.weight[segment.local] = table[segment.source].to(dtype)
    return layer


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (B, S), generator=generator)
    ids[0] = 7  # a frequent token
    ids[1, :3] = torch.tensor([0, 127, 130])
    return (
        ids,
        torch.randn(VOCAB, HIDDEN, generator=generator),
        torch.randn(S, B, HIDDEN, generator=generator),
    )


def _matches(sequence_parallel: bool) -> list[str]:
    tp = TensorParallel.over(dist.group.WORLD, sequence_parallel=sequence_parallel)
    ids, table, grad = _inputs()
    twin = table.clone().requires_grad_()
    twin_y = F.embedding(ids.t(), twin)
    twin_y.backward(grad)

    layer = _embedding(tp, table)
    with Events() as events:
        y = layer(ids)
        part = slice(None)
        if tp.sequence_sharded:
            part = slice(tp.rank * S // tp.size, (tp.rank + 1) * S // tp.size)
        assert torch.equal(y, twin_y[part])
        y.backward(grad[part])
    (segment,) = param_spec(layer.weight).segments
    # A sum over at most a few dozen tokens, in another order.
    torch.testing.assert_close(layer.weight.grad[segment.local], twin.grad[segment.source], rtol=1e-6, atol=1e-6)
    assert not layer.weight.grad[segment.shard.length :].any()
    return events.names


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_against_unsharded_twin(pool: WorkerPool, world: int, sequence_parallel: bool) -> None:
    for names in pool.run(_matches, world, sequence_parallel):
        expected = ["reduce_scatter", "all_gather"] if sequence_parallel else ["all_reduce"]
        assert names == (expected if world > 1 else [])


@pytest.mark.parametrize(
    ("vocab", "tp", "padded"),
    [(32003, 4, 32256), (32000, 2, 32000), (32000, 4, 32256), (32000, 8, 32768), (128256, 4, 128512), (131, 4, 512)],
)
def test_shards_cover_the_vocabulary_and_no_padding(vocab: int, tp: int, padded: int) -> None:
    assert padded_vocab_size(vocab, tp) == padded
    shards = [vocab_shard(vocab, tp, rank) for rank in range(tp)]
    assert [i for shard in shards for i in (shard.start, shard.stop)] == sorted(
        i for shard in shards for i in (shard.start, shard.stop)
    )
    assert sum(shard.length for shard in shards) == vocab
    assert all(shard.size == vocab and shard.length >= 0 for shard in shards)


def test_ids_outside_the_vocabulary_give_zeros() -> None:
    _, table, _ = _inputs()
    layer = _embedding(TensorParallel.single(), table)
    y = layer(torch.tensor([[-1, VOCAB, 10**6, 3]]))
    assert not y[:3].any() and torch.equal(y[3, 0], table[3])


def test_half_precision_gradient_of_a_frequent_token() -> None:
    layer = _embedding(TensorParallel.single(), torch.zeros(VOCAB, HIDDEN), torch.bfloat16)
    count = 3000
    layer(torch.full((1, count), 5)).backward(torch.full((count, 1, HIDDEN), 1.0, dtype=torch.bfloat16))
    # A bf16 running sum stops growing at 256.
    assert layer.weight.grad is not None
    assert layer.weight.grad[5].float().tolist() == pytest.approx([count] * HIDDEN, rel=2**-8)


def test_gradient_is_deterministic() -> None:
    ids, table, grad = _inputs()
    grads = []
    for _ in range(3):
        layer = _embedding(TensorParallel.single(), table)
        layer(ids).backward(grad)
        grads.append(layer.weight.grad)
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


def test_frozen_table() -> None:
    ids, table, _ = _inputs()
    layer = _embedding(TensorParallel.single(), table).requires_grad_(False)
    assert not layer(ids).requires_grad


def test_tied_is_marked() -> None:
    layer = VocabParallelEmbedding(
        VOCAB, HIDDEN, name="e", tp=TensorParallel.single(), dtype=torch.float32, device="cpu", tied=True
    )
    assert param_spec(layer.weight).tied
