"""The sum of a bucket over the data-parallel ranks, in flight while backward goes on."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from hybrid.collectives import reduce_scatter_single

Reduced = Callable[[], torch.Tensor]


def reduces_in_place(buffer: torch.Tensor, wire: torch.dtype) -> bool:
    """Whether the sum comes about in the buffer itself, without copies that travel."""
    # gloo's reduce-scatter moves the bytes of an all-reduce and takes twice the time of its all-to-all.
    return wire == torch.float32 and not buffer.is_cpu


def start_reduction(
    buffer: torch.Tensor, shard: tuple[int, int], group: dist.ProcessGroup, wire: torch.dtype
) -> Reduced:
    """Begin to sum `buffer` over the group; the returned call waits and gives the fp32 sum of `buffer[start:stop]`.

    Whatever the wire dtype, the addition is in fp32. Where a reduce-scatter cannot do that the pieces travel by
    all-to-all, which moves the same bytes, and are summed where they arrive.
    """
    start, stop = shard
    if reduces_in_place(buffer, wire):
        mine = buffer[start:stop]
        scattered = reduce_scatter_single(mine, buffer, group=group, async_op=True)

        def in_place() -> torch.Tensor:
            scattered.wait()
            return mine

        return in_place
    sent = buffer.to(wire)
    received = torch.empty_like(sent)
    exchanged = dist.all_to_all_single(received, sent, group=group, async_op=True)
    assert exchanged is not None

    def summed() -> torch.Tensor:
        exchanged.wait()
        return received.view(-1, stop - start).sum(dim=0, dtype=torch.float32)

    return summed
