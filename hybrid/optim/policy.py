"""When to reduce gradients under ZeRO-2: every microbatch into a shard, or once a step from a full buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GradientSharding = Literal["step", "microbatch"]


@dataclass(frozen=True)
class Policy:
    """A choice and the reason for it, in words for the log."""

    gradient_sharding: GradientSharding
    reason: str


def choose_policy(
    requested: Literal["auto", "step", "microbatch"],
    *,
    stage: int,
    parameters: int,
    parameter_bytes: int,
    data_parallel_size: int,
    micro_batches: int,
    memory_bytes: float | None,
) -> Policy:
    """The policy of a rank that holds `parameters` parameters of `parameter_bytes` each.

    With N parameters, d data-parallel ranks and m microbatches, reducing every microbatch sends 4 N m bytes a step and
    holds (2 + 16/d) N; reducing once sends 4 N and holds (6 + 12/d) N (of a bf16 model). So `auto` reduces once only
    where that saves traffic and the user gave enough memory for it.
    """
    if stage < 2:
        return Policy("step", f"stage {stage} reduces gradients once a step")
    if data_parallel_size == 1:
        return Policy("step", "one data-parallel rank has nothing to shard")
    if requested != "auto":
        return Policy(requested, f"hybrid.optimizer.gradient_sharding is {requested}")
    if micro_batches == 1:
        return Policy("microbatch", "with one microbatch sharding costs no traffic")
    # An fp32 model is its own master copy.
    states = 12 if parameter_bytes < 4 else 8
    needed = (parameter_bytes + 4 + states / data_parallel_size) * parameters
    if memory_bytes is None:
        return Policy("microbatch", "hybrid.optimizer.memory_gib is not given, so memory comes before traffic")
    if needed <= memory_bytes:
        return Policy(
            "step",
            f"full gradients fit ({needed / 2**30:.1f} of {memory_bytes / 2**30:.1f} GiB), "
            f"and reducing them once sends 1/{micro_batches} of the bytes",
        )
    return Policy(
        "microbatch", f"full gradients need {needed / 2**30:.1f} GiB of the {memory_bytes / 2**30:.1f} GiB given"
    )
