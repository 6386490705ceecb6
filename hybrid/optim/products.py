"""Products of matrices, summed where they are wanted: no gradient of its own lies in between.

Megatron-LM's gradient accumulation fusion, with torch's own GEMMs. In fp32 wherever the factors are; of bf16 and fp16
factors on CUDA devices, where torch can keep the accumulator that the GEMM has in any case.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def sums_products(out: Tensor, factor: Tensor) -> bool:
    """Whether `sum_product` can write products of such a factor to `out`."""
    if out.dtype == factor.dtype:
        return True
    return out.dtype == torch.float32 and out.device.type == "cuda" and _keeps_fp32(out.device, factor.dtype)


def sum_product(out: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """out += left right, or out = left right if it is the first: [m, n], [m, k] and [k, n]."""
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out) if first else torch.addmm(out, left, right, out=out)
    elif first:
        torch.mm(left, right, out.dtype, out=out)
    else:
        torch.addmm(out, left, right, out.dtype, out=out)


@functools.cache
def _keeps_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device sums products of `dtype` in fp32; tried once, because versions of torch differ."""
    ones, out = torch.ones(16, 16, dtype=dtype, device=device), torch.empty(16, 16, device=device)
    try:
        sum_product(out, ones, ones, first=True)
        sum_product(out, ones / 256, ones, first=False)
    except (RuntimeError, TypeError):
        return False
    return bool((out == 16.0625).all())
