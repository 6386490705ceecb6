"""Which operators a run gets, and Liger's against torch's."""

from __future__ import annotations

import builtins
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compiler import needs_compiler
from support.llama import small_config
from torch import Tensor

from hybrid.config.errors import ConfigError
from hybrid.model.block import Recompute, TransformerBlock
from hybrid.model.init import init_parameters
from hybrid.model.kernels import (
    TORCH,
    Kernels,
    choose_kernels,
    compile_problem,
    compiled_kernels,
    kernels_problem,
    liger_kernels,
    liger_problem,
)
from hybrid.model.rope import rope_tables, split_rotary
from hybrid.tensor_parallel.context import TensorParallel

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def without_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any) -> Any:
        if name.startswith("liger_kernel"):
            raise ModuleNotFoundError("No module named 'liger_kernel'")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_torch_is_chosen_where_liger_cannot_run() -> None:
    assert choose_kernels("torch", None) is TORCH
    assert choose_kernels("auto", liger_problem(CPU)) is TORCH
    assert choose_kernels("auto", "rank 3: liger-kernel cannot be imported") is TORCH


def test_liger_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError) as refusal:
        choose_kernels("liger", f"rank 0: {liger_problem(CPU)}")
    assert refusal.value.violations == (
        'hybrid.kernels is "liger", but on rank 0: liger-kernel needs a CUDA device, and this is cpu: choose auto or '
        "torch",
    )


def test_liger_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    without_liger(monkeypatch)
    problem = liger_problem(CUDA)
    assert choose_kernels("auto", problem) is TORCH
    with pytest.raises(ConfigError) as refusal:
        choose_kernels("liger", f"rank 0: {problem}")
    assert refusal.value.violations == (
        'hybrid.kernels is "liger", but on rank 0: liger-kernel 0.8.2 or newer cannot be imported (No module named '
        "'liger_kernel'): pip install -e '.[gpu]', or choose auto or torch",
    )


def test_a_compiler_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: Any) -> Any:
        raise RuntimeError("no compiler found\nand a long trace")

    monkeypatch.setattr(torch, "compile", fail)
    problem = kernels_problem("compile", CPU)
    assert choose_kernels("auto", problem) is TORCH
    with pytest.raises(ConfigError) as refusal:
        choose_kernels("compile", f"rank 1: {problem}")
    assert refusal.value.violations == (
        'hybrid.kernels is "compile", but on rank 1: torch.compile fails (no compiler found): install a C++ compiler, '
        "or choose auto or torch",
    )


def rms_norm_of(kernels: Kernels) -> Callable[..., Tensor]:
    return lambda x, weight: kernels.rms_norm(x, weight, 1e-5)


def swiglu_of(kernels: Kernels) -> Callable[..., Tensor]:
    return kernels.swiglu


def outputs(fn: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of two backward passes through one graph."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    result = fn(*leaves)
    for retain in (True, False):
        result.backward(grad, retain_graph=retain)
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def split_rotary_of(kernels: Kernels) -> Callable[[Tensor], Tensor]:
    def rotated(qkv: Tensor) -> Tensor:
        rope = rope_tables(small_config(head_dim=8), 5, qkv.device)
        q, k, v = split_rotary(qkv.flatten(0, 1), rope, 4, 1, kernels.rotation)
        return torch.cat((q, k, v), dim=2).flatten(2)

    return rotated


def check_operators(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> None:
    """Shapes that fill no block; the inputs and the incoming gradient must come out as they went in."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 48), 1 + 0.3 * torch.randn(48)
    cases = [(rms_norm_of, [x, weight]), (swiglu_of, [torch.randn(5, 3, 2 * 24)]), (split_rotary_of, [x])]
    # fp32: another order of summation. Else each of the 15 terms of the norm's weight gradient is rounded, to 8 bits in
    # bf16, 11 in fp16, and it is added to itself.
    rtol, atol = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 1e-2), torch.bfloat16: (2e-2, 1e-1)}[dtype]
    for operator, values in cases:
        inputs = [value.to(device, dtype) for value in values]
        grad = torch.randn(5, 3, 24 if operator is swiglu_of else 48).to(device, dtype)
        before = [*(value.clone() for value in inputs), grad.clone()]
        found, expected = (outputs(operator(choice), inputs, grad) for choice in (kernels, TORCH))
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=rtol, atol=atol)
        assert all(map(torch.equal, before, [*inputs, grad]))


def check_block(kernels: Kernels, device: torch.device, recompute: Recompute) -> None:
    """A layer's output and gradients, and bytes kept between the passes, those of torch's operators."""
    config = small_config()
    results, saved = [], []
    for choice in (TORCH, kernels):
        block = TransformerBlock(
            config,
            0,
            tp=TensorParallel.single(),
            dtype=torch.float32,
            device=device,
            recompute=recompute,
            kernels=choice,
        )
        init_parameters(block, 3, 0.02)
        torch.manual_seed(1)
        hidden = torch.randn(8, 2, config.hidden_size).to(device).requires_grad_()
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: Tensor, kept: dict[int, torch.UntypedStorage] = kept) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = block(hidden, rope_tables(config, 8, device))
        saved.append(sum(storage.nbytes() for storage in kept.values()))  # of one that was emptied, nothing
        result.square().mean().backward()
        grads = [param.grad for param in block.parameters()]
        results.append([result.detach(), hidden.grad, *grads])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)  # fp32 through a whole layer
    assert saved[0] == saved[1]


needs_liger = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("liger_kernel") is None,
    reason="Liger's kernels need a CUDA device and the package liger-kernel",
)


@pytest.mark.gpu
@needs_liger
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_liger_gives_what_torch_gives(dtype: torch.dtype) -> None:
    assert choose_kernels("auto", liger_problem(CUDA)).name == "Liger's but RoPE"
    check_operators(liger_kernels(), CUDA, dtype)


@pytest.mark.gpu
@needs_liger
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_layer_with_liger_is_the_layer_with_torch(recompute: Recompute) -> None:
    check_block(liger_kernels(), CUDA, recompute)


compiled = functools.cache(compiled_kernels)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_gives_what_torch_gives(dtype: torch.dtype) -> None:
    assert compile_problem(CPU) is None
    check_operators(compiled(), CPU, dtype)


@needs_compiler
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_compiled_layer_is_the_layer_of_torch(recompute: Recompute) -> None:
    check_block(compiled(), CPU, recompute)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_compiled_gives_what_torch_gives_on_a_gpu(dtype: torch.dtype) -> None:
    assert compile_problem(CUDA) is None
    check_operators(compiled(), CUDA, dtype)
