"""The sum of a bucket over the data-parallel ranks, in flight while backward goes on."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hybrid.collectives import Awaited, by_exchange, exchange_reduce, reduce_scatter_single


def reduces_in_place(buffer: torch.Tensor, wire: torch.dtype) -> bool:
    """Whether the sum comes about in the buffer itself, without copies that travel."""
    return wire == torch.float32 and not by_exchange(buffer)


def start_reduction(
    buffer: torch.Tensor, shard: tuple[int, int], group: dist.ProcessGroup, wire: torch.dtype
) -> Awaited:
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
    return exchange_reduce(buffer.to(wire), group, torch.float32)
