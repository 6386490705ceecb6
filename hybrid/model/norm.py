"""Root mean square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from hybrid.model.formulas import Formulas
from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.params import ParamSpec, replicated, set_spec


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The output, and 1 / rms(x) of each token."""
    exact = x.float()
    scale = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    return (exact * scale).to(x.dtype).mul_(weight), scale


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, need_input: bool, need_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    normed = x * scale  # fp32, as the scale is
    grad_input = grad_weight = None
    if need_weight:
        grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
    if need_input:
        inner = grad * weight.float()
        mean = (inner * normed).mean(-1, keepdim=True)
        grad_input = inner.sub_(normed.mul_(mean)).mul_(scale).to(x.dtype)
    return grad_input, grad_weight


RMS_NORM = Formulas(_forward, _backward)


class _RMSNorm(Function):
    """y = w x / rms(x), the statistics in fp32; x / rms(x) is rounded to x's dtype before w, as in Hugging Face.

    Keeps x and 1 / rms(x), one number per token; plain operations would keep three tensors as large as x, in fp32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, formulas: Formulas) -> Tensor:
        output, scale = formulas.forward(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.formulas = formulas
        result: Tensor = output
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_input, grad_weight = ctx.formulas.backward(grad, *ctx.saved_tensors, *ctx.needs_input_grad[:2])
        return grad_input, grad_weight, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, formulas: Formulas = RMS_NORM) -> Tensor:
    """x [..., h] normalised and scaled by weight [h]."""
    result: Tensor = _RMSNorm.apply(x, weight, eps, formulas)
    return result


class RMSNorm(nn.Module):
    """[..., h] to the same; the weight is held whole by every tensor-parallel rank.

    Under sequence parallelism each rank sees its part of the sequence only, so the weight's gradient is a partial sum,
    which the optimizer adds up over the ranks (`sequence_partial`). `operator` computes what `rms_norm` does.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        *,
        name: str,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device | str,
        operator: Callable[[Tensor, Tensor, float], Tensor] = rms_norm,
    ) -> None:
        super().__init__()
        self.eps = eps
        self._operator = operator
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype, device=device))
        segment = replicated(f"{name}.weight", (hidden_size,), tp.rank, tp.size)
        set_spec(self.weight, ParamSpec(segments=(segment,), decay=False, sequence_partial=tp.sequence_sharded))

    def forward(self, x: Tensor) -> Tensor:
        return self._operator(x, self.weight, self.eps)
