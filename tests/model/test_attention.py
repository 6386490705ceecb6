"""Attention: grouped heads, masks and dropout; the projections around it are tested with the whole decoder."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.pool import WorkerPool
from tensor_parallel.meters import LiveStorage

from hybrid.config.model import LlamaConfig
from hybrid.model import attention
from hybrid.model.attention import Attention, causal_attention
from hybrid.model.block import Recompute, TransformerBlock
from hybrid.model.init import init_parameters
from hybrid.model.packing import Documents
from hybrid.model.rope import rope_tables
from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.params import param_spec
from hybrid.tensor_parallel.random import RNGTracker

S, B, D = 10, 2, 8


def _config(**changes: object) -> LlamaConfig:
    raw = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaConfig.from_hf({**raw, **changes})


def _qkv(heads: int, kv_heads: int) -> list[torch.Tensor]:
    return [torch.randn(S, B, n, D, requires_grad=True) for n in (heads, kv_heads, kv_heads)]


def _definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    group = q.size(2) // k.size(2)
    heads = []
    for head in range(q.size(2)):
        scores = torch.einsum("sbd,tbd->bst", q[:, :, head], k[:, :, head // group]) / D**0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        heads.append(torch.einsum("bst,tbd->sbd", weights, v[:, :, head // group]))
    return torch.cat(heads, dim=-1)


@pytest.mark.parametrize("grouped_kernel", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_against_definition(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, masked: bool, grouped_kernel: bool
) -> None:
    monkeypatch.setattr(attention, "_grouped_kernel", lambda q, mask: grouped_kernel)
    q, k, v = _qkv(heads, kv_heads)
    mask = torch.ones(S, S, dtype=torch.bool).tril().expand(B, S, S).clone()
    if masked:
        mask[1, 6:, :6] = False  # a second document begins
    out = causal_attention(q, k, v, mask=mask.unsqueeze(1) if masked else None)
    expected = _definition(q, k, v, mask)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)  # fp32, another order of sums
    grad = torch.randn_like(out)
    actual_grads = torch.autograd.grad(out, (q, k, v), grad)
    torch.testing.assert_close(actual_grads, torch.autograd.grad(expected, (q, k, v), grad), rtol=1e-5, atol=1e-5)


def test_no_scores_are_held() -> None:
    length = 512
    q, k, v = (torch.randn(length, 1, n, D, requires_grad=True) for n in (4, 2, 2))
    with LiveStorage() as live:
        causal_attention(q, k, v).sum().backward()
    assert live.peak < length * length * 4  # one head's scores


def test_key_value_heads_are_replicated_where_ranks_are_more() -> None:
    owners = []
    for rank in range(4):
        # Only the shapes are looked at: no collective is called, so any group will do.
        tp = TensorParallel(group=object(), rank=rank, size=4)  # type: ignore[arg-type]
        layer = Attention(_config(), 0, tp=tp, dtype=torch.float32, device="meta")
        q, k, v = param_spec(layer.qkv_proj.weight).segments
        assert (q.shard.start, q.shard.stop) == (8 * rank, 8 * rank + 8)
        assert (k.shard.start, k.shard.stop) == (8 * (rank // 2), 8 * (rank // 2) + 8)
        assert k.shard == v.shard and k.shard.replicas == 2
        assert (k.offset, v.offset) == (8, 16)
        assert (q.partial, k.partial, v.partial) == (False, True, True)
        owners.append(k.shard.owner)
    assert owners == [True, False, True, False]


def _dropout(recompute: Recompute, alike: bool, packed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    tp = TensorParallel.over(dist.group.WORLD)
    rng = RNGTracker.for_rank(0, 0 if alike else tp.rank)
    tp = TensorParallel.over(dist.group.WORLD, rng=rng)
    config = _config(attention_dropout=0.5)
    block = TransformerBlock(config, 0, tp=tp, dtype=torch.float32, device="cpu", recompute=recompute)
    init_parameters(block, 0, 0.2)
    x = torch.randn(S, B, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    documents = Documents.of(torch.arange(S).expand(B, S) // 4) if packed else None
    y = block(x, rope_tables(config, S, "cpu"), documents)
    y = block(y, rope_tables(config, S, "cpu"), documents)
    y.sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize(("world", "packed"), [(1, False), (2, False), (2, True)])
def test_dropout_is_repeated_in_recomputation(pool: WorkerPool, world: int, packed: bool) -> None:
    plain = pool.run(_dropout, world, "none", False, packed)
    for recompute in ("selective", "full"):
        for (y, grad), (expected, expected_grad) in zip(
            pool.run(_dropout, world, recompute, False, packed), plain, strict=True
        ):
            assert torch.equal(y, expected) and torch.equal(grad, expected_grad)


def test_ranks_drop_different_weights(pool: WorkerPool) -> None:
    apart = pool.run(_dropout, 2, "none", False)
    assert torch.equal(apart[0][0], apart[1][0]), "the sum over ranks is the same everywhere"
    alike = pool.run(_dropout, 2, "none", True)
    assert not torch.equal(apart[0][0], alike[0][0])


def test_no_dropout_in_evaluation() -> None:
    tp = TensorParallel.single(RNGTracker.for_rank(0, 0))
    config = _config(attention_dropout=0.5)
    layer = Attention(config, 0, tp=tp, dtype=torch.float32, device="cpu")
    init_parameters(layer, 0, 0.2)
    x, rope = torch.randn(S, B, 32), rope_tables(config, S, "cpu")
    assert not torch.equal(layer(x, rope), layer(x, rope))
    layer.eval()
    assert torch.equal(layer(x, rope), layer(x, rope))
