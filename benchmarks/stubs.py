"""Collectives that cost nothing: what is left of a step's time without communication.

A rank receives what it sends, in the same memory where that is possible, and keeps the weights it has. Of what a
pipeline sends from stage to stage one element stays, so that the order of things and its bubble do; and so does a sum
of a few numbers, by which all ranks decide alike whether to take the step.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from hybrid.collectives import all_gather_single, reduce_scatter_single


class _Done:
    """The handle of something that is over."""

    def wait(self) -> None:
        """Return at once."""


_FEW = 16
"""Elements up to which a sum is a decision."""
_ALL_REDUCE, _SEND, _RECEIVE = dist.all_reduce, dist.isend, dist.irecv


def _all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return _ALL_REDUCE(tensor, *args, **kwargs) if tensor.numel() <= _FEW else _Done()


def _into_old(output: torch.Tensor, *args: Any, **kwargs: Any) -> _Done:
    # On a CPU only weights and buckets are gathered and scattered so, in place: what is there is finite.
    return _Done()


def _all_to_all(output: torch.Tensor, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> _Done:
    if output._base is None and output.shape == tensor.shape:
        output.set_(tensor)  # type: ignore[call-overload]
    else:
        output.copy_(tensor)
    return _Done()


def _send(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return _SEND(tensor.detach().flatten()[:1], *args, **kwargs)


def _receive(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    # The rest is what the memory held before, which might not be finite.
    return _RECEIVE(tensor.detach().zero_().view(-1)[:1], *args, **kwargs)


_STUBS: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = (
    (dist.all_reduce, _all_reduce),
    (dist.all_to_all_single, _all_to_all),
    (dist.isend, _send),
    (dist.irecv, _receive),
    (all_gather_single, _into_old),
    (reduce_scatter_single, _into_old),
)


@contextlib.contextmanager
def collectives_stubbed() -> Iterator[None]:
    """Inside the block this package's collectives move nothing between ranks; weights and losses become nonsense."""
    modules = [dist, *(module for name, module in sys.modules.items() if name.startswith("hybrid."))]
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name, value in list(vars(module).items()):
                for original, stub in _STUBS:
                    if value is original:
                        stack.enter_context(mock.patch.object(module, name, stub))
        yield
