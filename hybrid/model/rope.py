"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split as in Hugging Face, in fp32 always."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hybrid.config.model import LlamaConfig
from hybrid.model.formulas import Formulas

Rope = tuple[Tensor, Tensor]
"""cos and sin as they multiply [s, b, heads, d] and its halves exchanged: fp32, the first half of sin negated.

[s, 1, 1, d] for positions 0 .. s-1, or [s, b, 1, d] where positions differ between samples.
"""


def _frequencies(base: float | Tensor, dim: int) -> Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def _dynamic(config: LlamaConfig, seq_length: int) -> Tensor:
    """NTK-aware scaling: the base grows with the sequence once that is longer than the model was made for."""
    rope, dim, longest = config.rope, config.head_dim, config.max_position_embeddings
    assert rope.factor is not None, "checked with the configuration"
    if seq_length <= longest:
        return _frequencies(rope.rope_theta, dim)
    # A tensor, because transformers computes the base in fp32 here.
    scale = rope.factor * torch.tensor(seq_length) / longest - (rope.factor - 1)
    return _frequencies(rope.rope_theta * scale ** (dim / (dim - 2)), dim)


def _yarn(config: LlamaConfig) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): slow dims interpolated, fast ones kept, a ramp between them."""
    rope, dim, base = config.rope, config.head_dim, config.rope.rope_theta
    assert rope.factor is not None, "checked with the configuration"
    factor, original = rope.factor, rope.original_max_position_embeddings or config.max_position_embeddings

    def magnitude(scale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    def dim_of(rotations: float) -> float:
        """The dim that turns `rotations` times over the original length (equation 17)."""
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(base))

    attention_factor = rope.attention_factor
    if attention_factor is None and rope.mscale and rope.mscale_all_dim:
        attention_factor = magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    elif attention_factor is None:
        attention_factor = magnitude()

    low, high = dim_of(rope.beta_fast or 32), dim_of(rope.beta_slow or 1)
    if rope.truncate is None or rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp would divide by zero
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    wavelengths = base ** (torch.arange(0, dim, 2).float() / dim)
    inv_freq = 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    return inv_freq, attention_factor


def _llama3(config: LlamaConfig) -> Tensor:
    """LLaMA 3.1: wavelengths beyond the original context divided by `factor`, short ones kept, a blend between."""
    rope = config.rope
    assert rope.factor is not None and rope.low_freq_factor is not None and rope.high_freq_factor is not None
    low, high = rope.low_freq_factor, rope.high_freq_factor
    original = rope.original_max_position_embeddings or config.max_position_embeddings
    inv_freq = _frequencies(rope.rope_theta, config.head_dim)
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / rope.factor, blended)
    return torch.where(wavelength < original / high, inv_freq, scaled)


def inverse_frequencies(config: LlamaConfig, seq_length: int) -> tuple[Tensor, float]:
    """Rotation per position of each pair of dims, fp32 [d/2], and the factor on cos and sin.

    The five kinds of transformers' `rope_parameters`, computed in its order of operations so that they agree bit for
    bit. Only `dynamic` looks at `seq_length`.
    """
    rope = config.rope
    if rope.rope_type == "yarn":
        return _yarn(config)
    if rope.rope_type == "dynamic":
        return _dynamic(config, seq_length), 1.0
    if rope.rope_type == "llama3":
        return _llama3(config), 1.0
    inv_freq = _frequencies(rope.rope_theta, config.head_dim)
    if rope.rope_type == "linear":
        assert rope.factor is not None, "checked with the configuration"
        inv_freq /= rope.factor
    return inv_freq, 1.0


def rope_tables(config: LlamaConfig, seq_length: int, device: torch.device | str) -> Rope:
    """For positions 0 .. seq_length - 1: twice [s, 1, 1, d]."""
    # On the CPU first: transcendental functions differ between devices, and the table is made once.
    inv_freq, factor = inverse_frequencies(config, seq_length)
    angles = torch.arange(seq_length).float().unsqueeze(1) * inv_freq
    cos, sin = angles.cos() * factor, angles.sin() * factor
    tables = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    cos, sin = (table[:, None, None].to(device) for table in tables)
    return cos, sin


def rope_at(tables: Rope, positions: Tensor) -> Rope:
    """The tables of positions 0 .. s-1 at `positions` [s, b]: twice [s, b, 1, d]."""
    cos, sin = tables
    return cos[positions, 0], sin[positions, 0]


def _turned(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """x [s, b, heads, d], each pair (x_i, x_{i+d/2}) turned by its angle, or back; fp32 whatever x is.

    Hugging Face rounds cos, sin and each product to the model's dtype, which in bf16 is the less exact of the two and
    in fp32 the same.
    """
    exchanged = x.roll(x.size(-1) // 2, dims=-1)
    return (x * cos).add_(exchanged * sin, alpha=direction)


def _forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _turned(x, cos, sin, 1).to(x.dtype)


def _backward(grad: Tensor, cos: Tensor, sin: Tensor) -> None:
    """The rotation by the opposite angle, in place."""
    grad.copy_(_turned(grad, cos, sin, -1))


ROTATION = Formulas(_forward, _backward)


class _SplitRotary(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, rotation: Formulas
    ) -> tuple[Tensor, ...]:
        ctx.shape, ctx.rotation = qkv.shape, rotation
        ctx.save_for_backward(cos, sin)
        fused = qkv.view(cos.size(0), -1, heads + 2 * kv_heads, cos.size(-1))
        qk, v = fused.split([heads + kv_heads, kv_heads], dim=2)
        q, k = rotation.forward(qk, cos, sin).split([heads, kv_heads], dim=2)
        return q, k, v.contiguous()

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grad = torch.cat((dq, dk, dv), dim=2)
        ctx.rotation.backward(grad.narrow(2, 0, dq.size(2) + dk.size(2)), cos, sin)
        return grad.view(ctx.shape), None, None, None, None, None


def split_rotary(
    qkv: Tensor, rope: Rope, heads: int, kv_heads: int, rotation: Formulas = ROTATION
) -> tuple[Tensor, Tensor, Tensor]:
    """A fused [s b, (heads + 2 kv_heads) d] projection as rotated q and k, and v, each [s, b, its heads, d].

    v is a copy: as a view it would keep the unrotated q and k alive until backward, which needs nothing but the tables.
    """
    q, k, v = _SplitRotary.apply(qkv, *rope, heads, kv_heads, rotation)
    return q, k, v
