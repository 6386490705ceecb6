"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """The sign of an interpolated momentum, with decoupled weight decay.

    u = sign(b1 m + (1 - b1) g); w -= lr (u + decay w); m = b2 m + (1 - b2) g. One state per element.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            for param in params:
                if not self.state[param]:
                    self.state[param]["exp_avg"] = torch.zeros_like(param)
            grads = [param.grad for param in params]
            moments = [self.state[param]["exp_avg"] for param in params]
            beta1, beta2 = group["betas"]
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            update = torch._foreach_lerp(moments, grads, 1 - beta1)
            torch._foreach_sign_(update)
            torch._foreach_add_(params, update, alpha=-group["lr"])
            torch._foreach_lerp_(moments, grads, 1 - beta2)
