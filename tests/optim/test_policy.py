"""The choice between reducing every microbatch and once a step."""

import pytest

from hybrid.optim.policy import choose_policy


def choose(requested="auto", **changes):
    arguments = {
        "stage": 2,
        "parameters": 10**9,
        "parameter_bytes": 2,
        "data_parallel_size": 8,
        "micro_batches": 4,
        "memory_bytes": None,
        **changes,
    }
    return choose_policy(requested, **arguments)


@pytest.mark.parametrize(
    ("arguments", "expected", "reason"),
    [
        ({"stage": 0}, "step", "stage 0"),
        ({"stage": 1, "requested": "microbatch"}, "step", "stage 1"),
        ({"data_parallel_size": 1}, "step", "one data-parallel rank"),
        ({"requested": "step"}, "step", "gradient_sharding is step"),
        ({"requested": "microbatch", "memory_bytes": 1e12}, "microbatch", "gradient_sharding is microbatch"),
        ({"micro_batches": 1, "memory_bytes": 1e12}, "microbatch", "one microbatch"),
        ({}, "microbatch", "memory_gib is not given"),
        # 1e9 parameters, d 8: (6 + 12/8) GB = 7.5e9 bytes.
        ({"memory_bytes": 7.6e9}, "step", "1/4 of the bytes"),
        ({"memory_bytes": 7.4e9}, "microbatch", "need 7.0 GiB"),
        # fp32: (8 + 8/8) GB.
        ({"memory_bytes": 9.1e9, "parameter_bytes": 4}, "step", "fit"),
        ({"memory_bytes": 8.9e9, "parameter_bytes": 4}, "microbatch", "need"),
    ],
)
def test_choice(arguments, expected, reason):
    policy = choose(**arguments)
    assert policy.gradient_sharding == expected
    assert reason in policy.reason
