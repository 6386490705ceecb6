"""torch's variable-length attention: all documents of packed rows in one kernel, on devices that have it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hybrid.model.packing import Documents

_LARGEST_HEAD = 256
"""Of the flash kernel below it (Dao 2023, arXiv:2307.08691), which also needs a multiple of 8."""


@cache
def _kernel() -> Callable[..., Any] | None:
    """torch's function, or None where this torch has none that shares key/value heads."""
    try:
        # Only where it may be used: it imports torch's compiler, which takes a second.
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "enable_gqa" in inspect.signature(varlen_attn).parameters else None


@cache
def _is_ampere_or_later(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)


def has_kernel(q: Tensor, dropout: float) -> bool:
    """Whether the kernel takes queries like `q` [s, b, heads, d]: it has no dropout and no fp32."""
    return (
        q.device.type == "cuda"
        and q.dtype in (torch.bfloat16, torch.float16)
        and dropout == 0
        and q.size(-1) % 8 == 0
        and q.size(-1) <= _LARGEST_HEAD
        and _is_ampere_or_later(q.device)
        and _kernel() is not None
    )


def kernel_attention(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """[s, b, heads, d] and twice [s, b, kv_heads, d] to [s, b, heads d]; only where `has_kernel` says so."""
    kernel = _kernel()
    assert kernel is not None, "asked for with has_kernel"
    s, b, heads, _ = q.shape
    rows = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
    ends, longest = documents.offsets, documents.longest
    # A window without a right side is the causal rule.
    window = (-1, 0)
    out: Tensor = kernel(*rows, ends, ends, longest, longest, window_size=window, enable_gqa=heads != k.size(2))
    return out.view(b, s, -1).transpose(0, 1)
