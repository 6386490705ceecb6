"""RMSNorm, SwiGLU and RoPE, which a GPU's memory bounds: of torch, fused by torch.compile, or Liger's.

Liger's (Hsu et al. 2024, arXiv:2410.10989) are the norm and SwiGLU: its RoPE rotates contiguous q and k in place, so it
would take a copy of each out of the fused projection, and one of each gradient back into it; `split_rotary` writes
where they belong. Nothing else of a layer is compiled: matrix products and attention are kernels already, and between
them lie collectives, whose order is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from hybrid.config.errors import ConfigError
from hybrid.model.formulas import Formulas
from hybrid.model.mlp import FUSIBLE_SWIGLU, swiglu
from hybrid.model.norm import RMS_NORM, rms_norm
from hybrid.model.rope import ROTATION

Choice = Literal["auto", "torch", "liger", "compile"]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """One implementation of the operators. Each returns a new tensor and keeps nothing but its inputs (the norm also a
    number per token), so that `DiscardedOutput` may run it."""

    name: str
    """For the log."""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """As `hybrid.model.norm.rms_norm`."""
    swiglu: Callable[[Tensor], Tensor]
    """As `hybrid.model.mlp.swiglu`."""
    rotation: Formulas = ROTATION
    """As in `hybrid.model.rope`."""


TORCH = Kernels(name="torch's", rms_norm=rms_norm, swiglu=swiglu)


def compiled_kernels() -> Kernels:
    """torch's operators as Inductor fuses them: compiled when first called, and for other sizes again."""
    return Kernels(
        name="compiled",
        rms_norm=partial(rms_norm, formulas=RMS_NORM.compiled()),
        swiglu=partial(swiglu, formulas=FUSIBLE_SWIGLU.compiled()),
        rotation=ROTATION.compiled(),
    )


def liger_kernels() -> Kernels:
    """Liger's Triton kernels.

    Nothing is done in place: Liger can write gradients over the gradients that come in and over saved activations,
    unseen by autograd, which breaks a second backward pass and whoever else holds them. In half precision the outputs
    are rounded where torch's operators round them; terms of the norm's weight gradient are rounded before they are
    added, as in Hugging Face.

    Raises:
        ImportError: liger-kernel is not installed, or has no SwiGLU over a fused projection.
    """
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    def liger_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        offset, casting, in_place = 0.0, "llama", False
        result: Tensor = LigerRMSNormFunction.apply(x, weight, eps, offset, casting, in_place)
        return result

    def liger_swiglu(gate_up: Tensor) -> Tensor:
        # Its gradient has two dims whatever the input's.
        product: Tensor = LigerFusedGateUpSiLUMulFunction.apply(gate_up.flatten(0, -2), False)
        return product.view(*gate_up.shape[:-1], -1)

    return Kernels(name="Liger's but RoPE", rms_norm=liger_rms_norm, swiglu=liger_swiglu)


def liger_problem(device: torch.device) -> str | None:
    """Why Liger's kernels cannot run on `device`, with the remedy; None if they can."""
    if device.type != "cuda":
        return f"liger-kernel needs a CUDA device, and this is {device.type}: choose auto or torch"
    try:
        liger_kernels()
    except ImportError as error:
        remedy = "pip install -e '.[gpu]', or choose auto or torch"
        return f"liger-kernel 0.8.2 or newer cannot be imported ({error}): {remedy}"
    return None


def compile_problem(device: torch.device) -> str | None:
    """Why nothing can be compiled for `device`, with the remedy; None if it can, which is tried."""
    try:
        torch.compile(torch.sin)(torch.ones(16, device=device))
    except Exception as error:  # whatever the compiler behind it raises
        reason = str(error).strip().partition("\n")[0]
        needed = "Triton" if device.type == "cuda" else "a C++ compiler"
        return f"torch.compile fails ({reason}): install {needed}, or choose auto or torch"
    return None


def kernels_problem(wanted: Choice, device: torch.device) -> str | None:
    """Why the operators that `hybrid.kernels` names cannot run on `device`; None if they can."""
    if wanted == "torch":
        return None
    return compile_problem(device) if wanted == "compile" else liger_problem(device)


def choose_kernels(wanted: Choice, problem: str | None) -> Kernels:
    """The operators that `hybrid.kernels` names, given what `kernels_problem` found.

    Raises:
        ConfigError: `liger` or `compile`, and there is a problem.
    """
    if wanted == "torch" or (wanted == "auto" and problem is not None):
        return TORCH
    if problem is not None:
        raise ConfigError([f'hybrid.kernels is "{wanted}", but on {problem}'])
    return compiled_kernels() if wanted == "compile" else liger_kernels()
