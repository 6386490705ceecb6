"""Failures that every rank learns of: one rank's bad file ends the run with one message, not with a hang."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


EXIT_REFUSED = 2
"""Exit code of a run whose files or data are not what its configuration says."""

EXIT_FAILED = 1
"""Exit code of a run that broke off under way."""


class RemoteError(RuntimeError):
    """What another rank failed with."""


def together(call: Callable[[], T]) -> T:
    """`call()` on every rank; if it raises on any, every rank raises. A collective call.

    Raises:
        RemoteError: it failed elsewhere; names the rank and its message. A rank that failed raises its own error,
            unless a lower one failed with the same words: then that one's, so that they are said once.
    """
    error: Exception | None = None
    try:
        result = call()
    except Exception as failure:
        error = failure
    mine = None if error is None else str(error) or type(error).__name__
    messages = everyone(mine)
    if error is not None and messages.index(mine) == dist.get_rank():
        raise error
    failed = [(rank, message) for rank, message in enumerate(messages) if message is not None]
    if failed:
        raise RemoteError(f"rank {failed[0][0]}: {failed[0][1]}") from error
    return result


def rank_zero_first(call: Callable[[], T]) -> T:
    """`call()` on rank 0, then on the others, which find what it left in files. A collective call.

    Raises:
        RemoteError: as `together`.
    """
    if dist.get_rank() == 0:
        result = together(call)
        together(lambda: None)
        return result
    together(lambda: None)
    return together(call)


def rank_zero_only(call: Callable[[], object]) -> None:
    """`call()` on rank 0 while the others wait for it. A collective call.

    Raises:
        RemoteError: as `together`.
    """
    together(call if dist.get_rank() == 0 else lambda: None)


def refuse(error: Exception) -> int:
    """Say once what a user can mend, and return the exit code: the other ranks were told by the one that found it."""
    if not isinstance(error, RemoteError):
        print(f"rank {dist.get_rank()}: {error}", file=sys.stderr, flush=True)
    return EXIT_REFUSED


def fail(error: Exception) -> int:
    """Say once what every rank knows, and return the exit code."""
    if dist.get_rank() == 0:
        print(error, file=sys.stderr, flush=True)
    return EXIT_FAILED


def from_rank_zero(value: T) -> T:
    """Rank 0's `value` on every rank. A collective call."""
    if dist.get_world_size() == 1:
        return value
    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


def everyone(value: T) -> list[T]:
    """Every rank's `value`, by rank, on every rank. A collective call."""
    world_size = dist.get_world_size()
    values = [value] * world_size
    if world_size > 1:
        dist.all_gather_object(values, value)
    return values
