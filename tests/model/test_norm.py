"""RMSNorm against transformers' LlamaRMSNorm."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hybrid.model.norm import RMSNorm
from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.params import param_spec


def _norm(size: int, eps: float, dtype: torch.dtype) -> RMSNorm:
    return RMSNorm(size, eps, name="model.norm", tp=TensorParallel.single(), dtype=dtype, device="cpu")


@pytest.mark.parametrize("eps", [1e-5, 1e-2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_transformers(dtype: torch.dtype, eps: float) -> None:
    theirs, ours = LlamaRMSNorm(32, eps).to(dtype), _norm(32, eps, dtype)
    with torch.no_grad():
        theirs.weight.normal_(1.0, 0.3)
        ours.weight.copy_(theirs.weight)
    x = torch.randn(5, 3, 32).mul(0.1).to(dtype)  # small, so that eps matters
    grad = torch.randn(5, 3, 32).to(dtype)
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    y1, y2 = theirs(x1), ours(x2)
    assert torch.equal(y1, y2)
    y1.backward(grad)
    y2.backward(grad)
    # In bf16 transformers rounds intermediate gradients, which ours does not: equal up to that rounding.
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (2e-2, 5e-2)
    torch.testing.assert_close(x2.grad, x1.grad, rtol=rtol, atol=atol)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=rtol, atol=atol)


def test_gradients_in_fp64() -> None:
    weight = torch.randn(6, dtype=torch.float32, requires_grad=True)
    x = torch.randn(4, 2, 6, requires_grad=True)
    norm = _norm(6, 1e-3, torch.float32)
    norm.weight = torch.nn.Parameter(weight.detach().clone())
    grad = torch.randn(4, 2, 6)
    norm(x).backward(grad)
    exact, exact_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    (exact_weight * exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-3)).backward(grad.double())
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm.weight.grad.double(), exact_weight.grad, rtol=1e-5, atol=1e-6)


def test_saves_its_input_and_one_number_per_token() -> None:
    norm = _norm(32, 1e-5, torch.bfloat16)
    x = torch.randn(5, 3, 32, dtype=torch.bfloat16, requires_grad=True)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        norm(x)
    others = [t for t in saved if t.data_ptr() not in (x.data_ptr(), norm.weight.data_ptr())]
    assert sum(t.numel() for t in others) == 5 * 3


def test_spec() -> None:
    spec = param_spec(_norm(32, 1e-5, torch.float32).weight)
    assert not spec.decay and not spec.sequence_partial and spec.segments[0].hf_name == "model.norm.weight"
