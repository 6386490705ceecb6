"""Learning-rate factors, step by step."""

import pytest

from hybrid.config.training import LrScheduleConfig
from hybrid.optim.schedule import lr_factor


def factors(steps, **schedule):
    factor = lr_factor(LrScheduleConfig(**schedule), steps)
    return [factor(step) for step in range(steps + 2)]


def test_warm_up_ends_at_the_full_rate():
    assert factors(6, type="constant", warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1])
    assert factors(3, type="constant") == [1] * 5
    assert factors(2, type="constant", warmup_steps=10)[:2] == pytest.approx([0.1, 0.2])


def test_linear_reaches_the_minimum_at_the_end_of_the_run_and_stays():
    assert factors(4, type="linear", min_lr_ratio=0.2) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_is_that_of_transformers():
    import torch
    from transformers import get_cosine_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=3, num_training_steps=12)
    ours = factors(12, type="cosine", warmup_steps=3, min_lr_ratio=0.0)
    for step in range(12):
        if step >= 3:  # transformers' first step has rate 0, ours is a step further
            assert ours[step] == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()


def test_wsd_is_flat_until_its_decay():
    want = [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0]
    assert factors(10, type="wsd", warmup_steps=2, decay_steps=4, min_lr_ratio=0.0) == pytest.approx(
        [*want[:6], *want[5:6], *want[7:]]
    )
    assert factors(20, type="wsd", min_lr_ratio=0.0)[17:21] == pytest.approx([1, 1, 0.5, 0])
    # A decay that would begin in the warm-up begins at its end.
    assert factors(4, type="wsd", warmup_steps=2, decay_steps=4, min_lr_ratio=0.0)[:5] == pytest.approx(
        [0.5, 1, 1, 0.5, 0]
    )
