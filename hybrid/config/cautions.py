"""What is allowed in a configuration, but seldom meant."""

from __future__ import annotations

from hybrid.config.deepspeed import scheduler_of
from hybrid.config.run import RunConfig

_DEEPSPEED_WARMUP = 1000
"""Of DeepSpeed's schedules that have one, where `warmup_num_steps` is not given."""


def long_warmup(run: RunConfig) -> str | None:
    """What is to be said of a warm-up that the run does not outlast; None of any other."""
    training = run.hybrid.training
    if training.lr_schedule is not None:
        key, steps = "hybrid.training.lr_schedule.warmup_steps", training.lr_schedule.warmup_steps
    else:
        name, params = scheduler_of(run.ds) or ("", {})
        steps = params.get("warmup_num_steps", _DEEPSPEED_WARMUP) if name.startswith("Warmup") else 0
        key = "scheduler.params.warmup_num_steps"
    if steps < training.train_steps:
        return None
    return (
        f"{key} is {steps:,} and hybrid.training.train_steps {training.train_steps:,}: the learning rate rises to the "
        "end of the run; lower the first, or raise the second"
    )
