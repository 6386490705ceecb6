"""Learning-rate schedules: a factor of the peak rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

from hybrid.config.training import LrScheduleConfig

_WSD_DECAY_SHARE = 10
"""Without `decay_steps`, the decay of `wsd` takes one step in so many."""


def lr_factor(schedule: LrScheduleConfig, train_steps: int) -> Callable[[int], float]:
    """Factor of the peak learning rate at step 0, 1, ...

    A linear warm-up reaches 1 at its last step; then `cosine` and `linear` fall to `min_lr_ratio` at `train_steps`,
    `constant` stays, and `wsd` (warm-up, stable, decay; Hu et al. 2024) stays until it falls linearly in the last
    `decay_steps`.
    """
    warmup, start = schedule.warmup_steps, schedule.warmup_steps
    if schedule.type == "wsd":
        start = max(warmup, train_steps - (schedule.decay_steps or max(1, train_steps // _WSD_DECAY_SHARE)))
    decay = max(1, train_steps - start)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if schedule.type == "constant" or step < start:
            return 1.0
        progress = min(1.0, (step - start) / decay)
        remaining = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.type == "cosine" else 1 - progress
        return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * remaining

    return factor
