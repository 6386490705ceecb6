"""The loss scale of fp16 training, with DeepSpeed's keys and rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class LossScaler:
    """Static or dynamic scale: halved when gradients overflow, doubled after a window without overflow.

    Args:
        config: the `fp16` section. `loss_scale` 0 means dynamic, from 2 ** `initial_scale_power`; `hysteresis`
            overflows are forgiven before the first reduction; `consecutive_hysteresis` refills them at every good step,
            else only when the scale grows.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        static = float(config.get("loss_scale", 0))
        self.dynamic = static == 0
        self.scale = static or 2.0 ** config.get("initial_scale_power", 16)
        self._window = int(config.get("loss_scale_window", 1000))
        self._minimum = float(config.get("min_loss_scale", 1))
        self._full_hysteresis = int(config.get("hysteresis", 2))
        self._refill = bool(config.get("consecutive_hysteresis", False))
        self._hysteresis = self._full_hysteresis
        self._good_steps = 0

    def update(self, overflow: bool) -> None:
        """Learn whether the step overflowed.

        Raises:
            RuntimeError: the dynamic scale is at its minimum and the step still overflowed.
        """
        if not self.dynamic:
            return
        if not overflow:
            self._good_steps += 1
            if self._refill:
                self._hysteresis = self._full_hysteresis
            if self._good_steps % self._window == 0:
                self._hysteresis = self._full_hysteresis
                self.scale *= 2
            return
        self._good_steps = 0
        if self._hysteresis > 1:
            self._hysteresis -= 1
            return
        if self.scale <= self._minimum:
            raise RuntimeError(
                f"fp16 gradients overflow at the minimum loss scale {self._minimum:g} (fp16.min_loss_scale): "
                "the run cannot go on; lower the learning rate or train in bf16"
            )
        self.scale = max(self.scale / 2, self._minimum)

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs."""
        return {"scale": self.scale, "hysteresis": self._hysteresis, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore `state_dict`."""
        self.scale = float(state["scale"])
        self._hysteresis = int(state["hysteresis"])
        self._good_steps = int(state["good_steps"])
