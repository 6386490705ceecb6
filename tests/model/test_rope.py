"""Rotary tables and rotation against transformers', bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig as HFConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hybrid.config.model import LlamaConfig
from hybrid.model.rope import Rope, inverse_frequencies, rope_at, rope_tables, split_rotary

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn-mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5},
    "yarn-explicit": {**YARN, "attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-untruncated": {**YARN, "truncate": False},
    "llama3-8": {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 32},
    "llama3-32": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
}


def _raw(kind: str, theta: float = 10000.0, head_dim: int = 16) -> dict[str, Any]:
    return {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 128,
        "rope_parameters": {**KINDS[kind], "rope_theta": theta},
    }


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Queries [s, b, heads, d] alone."""
    queries, _, _ = split_rotary(x.flatten(2).flatten(0, 1), (cos, sin), x.size(2), 0)
    return queries


def _as_in_transformers(tables: Rope) -> Rope:
    """cos and sin, [s, d], both halves alike."""
    cos, sin = (table[:, 0, 0] for table in tables)
    first, second = sin.chunk(2, dim=-1)
    return cos, torch.cat((-first, second), dim=-1)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_those_of_transformers(kind: str, theta: float, head_dim: int) -> None:
    raw = _raw(kind, theta, head_dim)
    config = LlamaConfig.from_hf(raw)
    for length in (1, 100, 128, 300):
        theirs = LlamaRotaryEmbedding(HFConfig(**raw))
        cos, sin = theirs(torch.zeros(1), torch.arange(length)[None])
        ours = rope_tables(config, length, "cpu")
        assert all(table.dtype == torch.float32 and table.shape == (length, 1, 1, head_dim) for table in ours)
        assert torch.equal(inverse_frequencies(config, length)[0], theirs.inv_freq)
        assert all(map(torch.equal, _as_in_transformers(ours), (cos[0], sin[0])))


@pytest.mark.parametrize("kind", ["default", "dynamic", "yarn", "llama3-32"])
def test_tables_of_128k_positions_are_those_of_transformers(kind: str) -> None:
    """fp32 counts positions exactly up to 2^24."""
    raw = _raw(kind, 500000.0, 64)
    positions = torch.arange(131072)
    cos, sin = LlamaRotaryEmbedding(HFConfig(**raw))(torch.zeros(1), positions[None])
    ours = rope_tables(LlamaConfig.from_hf(raw), len(positions), "cpu")
    assert all(map(torch.equal, _as_in_transformers(ours), (cos[0], sin[0])))


def test_llama3_frequencies_by_hand() -> None:
    config = LlamaConfig.from_hf(_raw("llama3-8", head_dim=8))
    inv_freq, factor = inverse_frequencies(config, 8)
    torch.testing.assert_close(inv_freq, torch.tensor([1.0, 0.0125, 0.00125, 0.000125]))
    assert factor == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation(dtype: torch.dtype) -> None:
    tables = rope_tables(LlamaConfig.from_hf(_raw("default")), 12, "cpu")
    cos, sin = _as_in_transformers(tables)
    x = torch.randn(12, 2, 3, 16).to(dtype)
    ours = apply_rope(x, *tables)
    assert ours.dtype == dtype
    exact = x.float().permute(1, 2, 0, 3)
    theirs = apply_rotary_pos_emb(exact, exact, cos[None], sin[None])[0].permute(2, 0, 1, 3)
    assert torch.equal(ours, theirs.to(dtype)), "fp32 inside, rounded once"


def test_backward_is_the_transpose() -> None:
    tables = rope_tables(LlamaConfig.from_hf(_raw("yarn")), 12, "cpu")
    cos, sin = _as_in_transformers(tables)
    x = torch.randn(12, 2, 3, 16, requires_grad=True)
    grad = torch.randn(12, 2, 3, 16)
    first, second = x.chunk(2, -1)
    c, s = cos[:, None, None], sin[:, None, None]
    (x * c + torch.cat((-second, first), -1) * s).backward(grad)
    expected, x.grad = x.grad, None
    apply_rope(x, *tables).backward(grad)
    torch.testing.assert_close(x.grad, expected, rtol=1e-6, atol=1e-6)


def test_tables_per_sample() -> None:
    cos, sin = rope_tables(LlamaConfig.from_hf(_raw("default")), 12, "cpu")
    x = torch.randn(6, 2, 3, 16)
    positions = torch.stack((torch.arange(6), torch.tensor([0, 1, 2, 0, 1, 2])), dim=1)  # [s, b]
    packed = apply_rope(x, *rope_at((cos, sin), positions))
    assert torch.equal(packed[:, 0], apply_rope(x, cos[:6], sin[:6])[:, 0])
    assert torch.equal(packed[3:, 1], apply_rope(x[3:], cos[:3], sin[:3])[:, 1])


def test_split_is_rotation_of_the_parts() -> None:
    rope = rope_tables(LlamaConfig.from_hf(_raw("default")), 12, "cpu")
    heads, kv_heads, d = 4, 2, 16
    qkv = torch.randn(12 * 2, (heads + 2 * kv_heads) * d, requires_grad=True)
    parts = qkv.view(12, 2, -1, d).split([heads, kv_heads, kv_heads], dim=2)
    expected = apply_rope(parts[0], *rope), apply_rope(parts[1], *rope), parts[2]
    grads = [torch.randn_like(part) for part in parts]
    torch.autograd.backward(expected, grads)
    expected_grad, qkv.grad = qkv.grad, None
    actual = split_rotary(qkv, rope, heads, kv_heads)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    torch.autograd.backward(actual, grads)
    assert torch.equal(qkv.grad, expected_grad)


def test_tables_are_fp32_whatever_the_default_dtype() -> None:
    config = LlamaConfig.from_hf(_raw("yarn"))
    expected = rope_tables(config, 12, "cpu")
    torch.set_default_dtype(torch.bfloat16)
    try:
        tables = rope_tables(config, 12, "cpu")
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(tables, expected, strict=True))
