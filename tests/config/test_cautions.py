"""What is allowed, but said."""

from __future__ import annotations

import pytest

from hybrid.config.cautions import long_warmup
from hybrid.config.load import load_config
from hybrid.planner.banner import dry_run


@pytest.mark.parametrize(("steps", "said"), [(3, True), (10, True), (11, False)])
def test_a_warm_up_that_the_run_does_not_outlast(steps: int, said: bool) -> None:
    run = load_config("z2", flags={"train_steps": steps}, world_size=1)
    caution = long_warmup(run)
    assert (caution is not None) == said == ("caution: " in dry_run(run))
    if caution is not None:
        assert caution.startswith(
            f"hybrid.training.lr_schedule.warmup_steps is 10 and hybrid.training.train_steps {steps}: "
        )
        assert dry_run(run).count(caution) == 1


@pytest.mark.parametrize(
    ("scheduler", "steps"),
    [
        ('{"type": "WarmupLR", "params": {"warmup_num_steps": 20}}', "20"),
        ('{"type": "warmuplr"}', "1,000"),
        ('{"type": "LRRangeTest"}', None),
    ],
)
def test_deepspeeds_schedules(scheduler: str, steps: str | None) -> None:
    run = load_config("z2", ["hybrid.training.lr_schedule=null", f"scheduler={scheduler}"], {"train_steps": 20}, 1)
    caution = long_warmup(run)
    assert caution is None if steps is None else f"scheduler.params.warmup_num_steps is {steps} and" in str(caution)
