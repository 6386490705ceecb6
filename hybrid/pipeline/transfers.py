"""Messages between the ranks of a pipeline: received into buffers posted ahead, sent without waiting.

Activations go from each rank to the next, gradients back; around a ring, from the last rank to the first as well. When
a rank has a message, it posts the receive of the one after it, which arrives while the rank computes. A send returns at
once; its tensor is kept until the receiver has it.

That no rank waits for ever:

1. Both ends of a channel (a kind of message from one rank to one other) take its messages in one order, that of the
   passes: the schedule lists the sends of one rank as it lists the receives of the other.
2. In a process group a rank either only sends or only receives, to or from one other rank. NCCL runs what a rank does
   in a group in order: a receive, which runs until its message comes, would hold up a send behind it, and two ranks
   that both had posted theirs would wait for ever. Here it holds up receives of its own channel only, whose messages
   come later anyway. gloo would not need the groups.
3. So a rank waits for two things: a receive for its message, and a send for the one `SENDS_AHEAD` before it to be
   received. No schedule stops at that, which tests show by playing all of them with ranks that wait so. What holds for
   processes holds for the streams of a device, where a channel's operations begin after the passes before them.
4. NCCL may connect two ranks when they first meet, and makes one wait for the other: the channels are opened before any
   message, one after the other, in one order on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from hybrid.grid import Grid, Group, group_of
from hybrid.pipeline.rounds import SENDS_AHEAD

Kind = Literal["activations", "gradients"]
KINDS: tuple[Kind, Kind] = ("activations", "gradients")

Form = tuple[torch.Size, torch.dtype]
"""What a tensor's receiver has to know."""


class Outbox:
    """The sending end of a channel."""

    def __init__(self, peer: int, group: Group) -> None:
        self._peer, self._group = peer, group
        self._sent: deque[list[tuple[torch.Tensor, Any]]] = deque()

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send a message; its tensors must not be written to any more."""
        if len(self._sent) == SENDS_AHEAD:
            self._finish_oldest()
        self._sent.append([(tensor, dist.isend(tensor, self._peer, group=self._group)) for tensor in tensors])

    def finish(self) -> None:
        """Wait until everything is received."""
        while self._sent:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        for _, work in self._sent.popleft():
            work.wait()


class Inbox:
    """The receiving end of a channel."""

    def __init__(self, peer: int, group: Group, device: torch.device) -> None:
        self._peer, self._group, self._device = peer, group, device
        self._left = 0
        self._posted: list[tuple[torch.Tensor, Any]] = []

    def expect(self, count: int) -> None:
        """So many messages will come: none is posted that is not sent."""
        self._left = count

    def receive(self, forms: Sequence[Form]) -> tuple[torch.Tensor, ...]:
        """The next message; the one after it, of the same forms, is posted."""
        message = self._posted or self._post(forms)
        for _, work in message:
            work.wait()
        self._posted = self._post(forms) if self._left else []
        return tuple(tensor for tensor, _ in message)

    def _post(self, forms: Sequence[Form]) -> list[tuple[torch.Tensor, Any]]:
        self._left -= 1
        tensors = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in forms]
        return [(tensor, dist.irecv(tensor, self._peer, group=self._group)) for tensor in tensors]


class Transfers:
    """The channels of this rank. Making them is a collective call of all ranks.

    Args:
        ring: whether the last rank of a pipeline also sends to its first.
    """

    def __init__(self, grid: Grid, device: torch.device, *, ring: bool) -> None:
        pipelines = grid.topology.get_axis_comm_lists("pipe")
        ranks = next(ranks for ranks in pipelines if grid.rank in ranks)
        colours = edge_colours(len(ranks), ring=ring)
        groups = {
            (kind, colour): group_of(grid.rank, pipelines) for kind in KINDS for colour in range(max(colours) + 1)
        }
        self._outboxes: dict[Kind, Outbox] = {}
        self._inboxes: dict[Kind, Inbox] = {}
        for edge, colour in enumerate(colours):
            ends = ranks[edge], ranks[(edge + 1) % len(ranks)]
            for kind, (source, target) in zip(KINDS, (ends, ends[::-1]), strict=True):
                if grid.rank == source:
                    self._outboxes[kind] = Outbox(target, groups[kind, colour])
                    self._outboxes[kind].send([torch.zeros(1, device=device)])
                elif grid.rank == target:
                    self._inboxes[kind] = Inbox(source, groups[kind, colour], device)
                    self._inboxes[kind].expect(1)
                    self._inboxes[kind].receive([(torch.Size([1]), torch.float32)])
        self.finish()

    def expect(self, counts: Mapping[Kind, int]) -> None:
        """What this rank will receive until `finish`."""
        for kind, inbox in self._inboxes.items():
            inbox.expect(counts[kind])

    def send(self, kind: Kind, tensors: Sequence[torch.Tensor]) -> None:
        """Send contiguous tensors; they must not be written to any more."""
        self._outboxes[kind].send(tensors)

    def receive(self, kind: Kind, forms: Sequence[Form]) -> tuple[torch.Tensor, ...]:
        """The next message of a kind, whose tensors have these forms."""
        return self._inboxes[kind].receive(forms)

    def finish(self) -> None:
        """Wait until everything that was sent is received."""
        for outbox in self._outboxes.values():
            outbox.finish()


def edge_colours(ranks: int, *, ring: bool) -> list[int]:
    """Of each edge from a rank to the next a number that no other edge of the two ranks has, as few as there can be.

    >>> edge_colours(4, ring=False), edge_colours(4, ring=True), edge_colours(3, ring=True)
    ([0, 1, 0], [0, 1, 0, 1], [0, 1, 2])
    """
    colours = [edge % 2 for edge in range(ranks if ring else ranks - 1)]
    if ring and ranks % 2:
        colours[-1] = 2
    return colours
