"""The stack of layers against transformers' LlamaForCausalLM on one process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model.decoder import Decoder, Piece, assemble, gradient_pieces, load_hf
from support.pool import WorkerPool
from tensor_parallel.meters import Events, LiveStorage
from torch import Tensor
from transformers import LlamaConfig as HFConfig
from transformers import LlamaForCausalLM

from hybrid.config.model import LlamaConfig
from hybrid.model.block import Recompute
from hybrid.model.rope import rope_tables
from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.cross_entropy import IGNORE_INDEX
from hybrid.tensor_parallel.params import named_segments, param_spec

BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
UNUSUAL = {
    "head_dim": 12,
    "attention_bias": True,
    "mlp_bias": True,
    "rms_norm_eps": 1e-2,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
VARIANTS = {"base": BASE, "unusual": {**BASE, **UNUSUAL}, "mqa": {**BASE, "num_key_value_heads": 1}}
B, S = 2, 16
LEARNING_RATE = 0.1


@dataclass
class Reference:
    config: LlamaConfig
    state: dict[str, Tensor]
    ids: Tensor
    labels: Tensor
    logits: Tensor
    loss: Tensor
    grads: dict[str, Tensor]


@cache
def _reference(variant: str) -> Reference:
    raw = VARIANTS[variant]
    model = LlamaForCausalLM(HFConfig(**raw, attn_implementation="sdpa"))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, param in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            param.copy_(centre + 0.2 * torch.randn(param.shape, generator=generator))
    ids = torch.randint(0, raw["vocab_size"], (B, S), generator=generator)
    labels = torch.cat((ids[:, 1:], torch.full((B, 1), IGNORE_INDEX)), dim=1)
    labels[0, 3:9] = IGNORE_INDEX
    # transformers shifts by itself: its labels are ours, one to the right.
    out = model(ids, labels=torch.cat((ids[:, :1], labels[:, :-1]), dim=1))
    loss = out.loss * (labels != IGNORE_INDEX).sum()
    loss.backward()
    grads = {name: param.grad.clone() for name, param in model.named_parameters()}
    state = {name: param.detach() for name, param in model.named_parameters()}
    return Reference(LlamaConfig.from_hf(raw), state, ids, labels, out.logits.detach(), loss.detach(), grads)


@dataclass
class Result:
    logits: Tensor
    loss: Tensor
    count: int
    grads: dict[str, Piece]


def _run(
    reference: Reference, sequence_parallel: bool, recompute: Recompute, dtype: torch.dtype = torch.float32
) -> Result:
    tp = TensorParallel.over(dist.group.WORLD, sequence_parallel=sequence_parallel)
    model = Decoder(reference.config, tp, dtype, recompute)
    load_hf(model, reference.state)
    with torch.no_grad():
        logits = model.logits(reference.ids)
    loss, count = model(reference.ids, reference.labels)
    loss.backward()
    return Result(logits, loss.detach(), int(count), gradient_pieces(model))


def _check(results: list[Result], reference: Reference) -> None:
    config = reference.config
    logits = torch.cat([r.logits for r in results], dim=-1)[..., : config.vocab_size]
    torch.testing.assert_close(logits, reference.logits, rtol=0.0, atol=1e-5)
    for result in results:
        torch.testing.assert_close(result.loss, reference.loss, rtol=1e-6, atol=1e-5)
        assert result.count == (reference.labels != IGNORE_INDEX).sum()
    grads = assemble([r.grads for r in results])
    assert grads.keys() == reference.grads.keys()
    for name, grad in grads.items():
        expected = reference.grads[name]
        # Entries that nearly cancel are compared on the scale of their tensor.
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item(), msg=name)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("world", "sequence_parallel", "recompute"),
    [
        (1, False, "none"),
        (2, False, "full"),
        (2, True, "selective"),
        (4, False, "selective"),
        (4, True, "full"),
        (4, True, "none"),
    ],
)
def test_parity_with_transformers(
    pool: WorkerPool, variant: str, world: int, sequence_parallel: bool, recompute: Recompute
) -> None:
    reference = _reference(variant)
    _check(pool.run(_run, world, reference, sequence_parallel, recompute), reference)


def test_bf16_is_close() -> None:
    reference = _reference("base")
    model = Decoder(reference.config, TensorParallel.single(), torch.bfloat16)
    load_hf(model, reference.state)
    loss, count = model(reference.ids, reference.labels)
    loss.backward()
    torch.testing.assert_close(loss / count, reference.loss / count, rtol=0.0, atol=2e-2)
    for name, grad in assemble([gradient_pieces(model)]).items():
        cosine = torch.cosine_similarity(grad.flatten(), reference.grads[name].flatten(), dim=0)
        assert cosine > 0.99, name


@pytest.mark.parametrize("variant", ["base", "unusual"])
def test_recompute_changes_no_bit_and_keeps_less(variant: str) -> None:
    reference = _reference(variant)
    held, outputs = [], []
    recomputes: tuple[Recompute, ...] = ("none", "selective", "full")
    for recompute in recomputes:
        model = Decoder(reference.config, TensorParallel.single(), recompute=recompute)
        load_hf(model, reference.state)
        with LiveStorage(model.parameters()) as live:
            hidden = model.hidden(reference.ids)
            held.append(live.bytes)
        hidden.square().sum().backward()
        outputs.append([hidden, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert held[0] > held[1] > held[2]
    for other in outputs[1:]:
        assert len(other) == len(outputs[0])
        assert all(torch.equal(a, b) for a, b in zip(outputs[0], other, strict=True))


def test_activation_bytes_are_the_least_without_a_second_gemm() -> None:
    """4 + 2 kv/a + 2 f/h numbers per token and layer: two norm inputs, q and context, k and v, gate and up."""
    reference = _reference("base")
    config = reference.config
    held = []
    for layers in (1, 3):
        shallow = config.model_copy(update={"num_hidden_layers": layers})
        model = Decoder(shallow, TensorParallel.single(), recompute="selective")
        load_hf(model, reference.state)
        with LiveStorage(model.parameters()) as live:
            hidden = model.hidden(reference.ids)
            held.append(live.bytes)
        del hidden
    kv, a = config.num_key_value_heads, config.num_attention_heads
    floats = (4 + 2 * kv / a) * config.hidden_size + 2 * config.intermediate_size
    statistics = 2 + a  # rstd of two norms, logsumexp of each head
    assert (held[1] - held[0]) / 2 / (B * S) / 4 == floats + statistics


def _frozen(reference: Reference, recompute: Recompute) -> dict[str, Piece]:
    tp = TensorParallel.over(dist.group.WORLD, sequence_parallel=True)
    model = Decoder(reference.config, tp, recompute=recompute)
    load_hf(model, reference.state)
    model.requires_grad_(False)
    trained = model.blocks[1].mlp.down_proj
    trained.requires_grad_(True)
    model.embed.weight.requires_grad_(False)
    loss, _ = model(reference.ids, reference.labels)
    loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == [
        "blocks.1.mlp.down_proj.weight",
        "blocks.1.mlp.down_proj.bias",
    ]
    return gradient_pieces(trained)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_frozen_weights(pool: WorkerPool, recompute: Recompute) -> None:
    reference = _reference("unusual")
    for name, grad in assemble(pool.run(_frozen, 2, reference, recompute)).items():
        expected = reference.grads[name]
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def _collectives(reference: Reference, sequence_parallel: bool, recompute: Recompute) -> list[dict[str, int]]:
    """Per pass, for the blocks alone."""
    tp = TensorParallel.over(dist.group.WORLD, sequence_parallel=sequence_parallel)
    counts = []
    model = Decoder(reference.config, tp, recompute=recompute)
    load_hf(model, reference.state)
    embedded = model.embed(reference.ids).detach().requires_grad_()
    rope = rope_tables(reference.config, S, "cpu")
    with Events() as forward:
        x = embedded
        for block in model.blocks:
            x = block(x, rope)
    with Events() as backward:
        x.backward(torch.ones_like(x))
    for events in (forward, backward):
        names = ("all_gather", "reduce_scatter", "all_reduce", "gemm")
        counts.append({name: events.count(name) // len(model.blocks) for name in names})
    return counts


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_collectives_per_layer_are_megatrons(pool: WorkerPool, recompute: Recompute) -> None:
    reference = _reference("base")
    for forward, backward in pool.run(_collectives, 2, reference, True, recompute):
        assert forward == {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 0, "gemm": 4}
        # Two more GEMMs, not more work: the rows at hand are multiplied while the others are gathered.
        assert backward == {"all_gather": 4, "reduce_scatter": 2, "all_reduce": 0, "gemm": 10}
    for forward, backward in pool.run(_collectives, 2, reference, False, recompute):
        assert forward == {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 2, "gemm": 4}
        assert backward == {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 2, "gemm": 8}


def _train(reference: Reference, steps: int) -> tuple[dict[str, Tensor], list[float]]:
    """SGD, with the sum over the axis that sequence-parallel parameters need; these parameters and the losses."""
    tp = TensorParallel.over(dist.group.WORLD, sequence_parallel=True)
    model = Decoder(reference.config, tp)
    load_hf(model, reference.state)
    losses = []
    for _ in range(steps):
        model.zero_grad()
        loss, count = model(reference.ids, reference.labels)
        (loss / count).backward()
        losses.append(loss.item())
        with torch.no_grad():
            for param in model.parameters():
                if param_spec(param).sequence_partial:
                    dist.all_reduce(param.grad)
                param -= LEARNING_RATE * param.grad
    partial = (p for p in model.parameters() if param_spec(p).sequence_partial)
    return {param_spec(p).segments[0].hf_name: p.detach().clone() for p in partial}, losses


def test_replicated_parameters_stay_equal_under_sequence_parallelism(pool: WorkerPool) -> None:
    reference = _reference("unusual")
    steps = 3
    model = Decoder(reference.config, TensorParallel.single())
    load_hf(model, reference.state)
    expected_losses = []
    for _ in range(steps):
        model.zero_grad()
        loss, count = model(reference.ids, reference.labels)
        (loss / count).backward()
        expected_losses.append(loss.item())
        with torch.no_grad():
            for param in model.parameters():
                param -= LEARNING_RATE * param.grad
    expected = {segment.hf_name: param.detach() for param, segment in named_segments(model)}

    ranks = pool.run(_train, 2, reference, steps)
    assert len(ranks[0][0]) == 2 * 3 + 1 + 2 * 3, "the norms, and the biases of o_proj and down_proj"
    for partial, losses in ranks:
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        for name, param in partial.items():
            assert torch.equal(param, ranks[0][0][name]), name
            torch.testing.assert_close(param, expected[name], rtol=1e-4, atol=1e-6, msg=name)
