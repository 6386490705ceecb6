"""SwiGLU against its definition, and what the MLP keeps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybrid.model.mlp import swiglu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_definition(dtype: torch.dtype) -> None:
    gate_up = torch.randn(5, 3, 2 * 8).to(dtype)
    grad = torch.randn(5, 3, 8).to(dtype)
    x1, x2 = gate_up.clone().requires_grad_(), gate_up.clone().requires_grad_()
    gate, up = x1.chunk(2, -1)
    expected = F.silu(gate) * up
    actual = swiglu(x2)
    assert torch.equal(actual, expected)
    expected.backward(grad)
    actual.backward(grad)
    assert torch.equal(x2.grad, x1.grad)


def test_gradient_in_fp64() -> None:
    assert torch.autograd.gradcheck(swiglu, torch.randn(4, 2, 6, dtype=torch.float64, requires_grad=True))


def test_keeps_only_its_input() -> None:
    gate_up = torch.randn(5, 3, 16, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        swiglu(gate_up)
    assert [t.data_ptr() for t in saved] == [gate_up.data_ptr()]
