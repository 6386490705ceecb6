"""Messages between pipeline ranks: nobody waits for a receiver that computes, and no schedule for ever."""

import itertools
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from support.llama import small_config

from hybrid.config.parallel import ParallelConfig
from hybrid.grid import build_grid
from hybrid.pipeline.rounds import SENDS_AHEAD
from hybrid.pipeline.schedule import PassSchedule
from hybrid.pipeline.transfers import KINDS, Transfers, edge_colours


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("ranks", range(2, 10))
def test_edges_that_share_a_rank_differ_in_colour(ranks, ring):
    edges = [({edge, (edge + 1) % ranks}, colour) for edge, colour in enumerate(edge_colours(ranks, ring=ring))]
    assert len(edges) == (ranks if ring else ranks - 1)
    for (ends, colour), (others, other) in itertools.combinations(edges, 2):
        assert colour != other or not ends & others


def played_to_the_end(streams):
    """Whether all ranks finish if a send waits until less than SENDS_AHEAD messages of its channel are not received."""
    left = [list(reversed(stream)) for stream in streams]
    under_way = Counter()
    moved = True
    while moved:
        moved = False
        for rank, stream in enumerate(left):
            while stream:
                action, kind = stream[-1][:4], stream[-1][4:]
                step = 1 if kind == "Activation" else -1
                if action == "Send":
                    channel = kind, (rank + step) % len(left)
                    if under_way[channel] == SENDS_AHEAD:
                        break
                    under_way[channel] += 1
                elif action == "Recv":
                    if not under_way[kind, rank]:
                        break
                    under_way[kind, rank] -= 1
                stream.pop()
                moved = True
    return not any(left) and not under_way.total()


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("ranks", range(2, 9))
def test_no_schedule_stops(ranks, chunks, forward_only):
    for micro_batches in range(1, 4 * ranks + 1):
        if chunks > 1 and micro_batches % ranks and not forward_only:
            continue
        streams = []
        for rank in range(ranks):
            schedule = PassSchedule(micro_batches, ranks, rank, chunks=chunks, forward_only=forward_only)
            streams.append([type(instruction).__name__ for step in schedule for instruction in step])
        assert played_to_the_end(streams), micro_batches


FORMS = [(torch.Size([3, 2]), torch.bfloat16), (torch.Size([5]), torch.int32)]


def message(rank, kind, number):
    value = 40 * rank + 20 * KINDS.index(kind) + number
    return [torch.full(shape, value, dtype=dtype) for shape, dtype in FORMS]


def exchange(ring, count):
    """Every rank sends before anyone receives; the numbers of the senders of what arrives, or None at an end."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    grid = build_grid(ParallelConfig(pipeline_model_parallel_size=ranks), small_config().num_key_value_heads)
    transfers = Transfers(grid, torch.device("cpu"), ring=ring)
    sources = {"activations": (rank - 1) % ranks, "gradients": (rank + 1) % ranks}
    ends = {} if ring else {"activations": (ranks - 1, 0), "gradients": (0, ranks - 1)}  # who neither sends, receives
    sends = [kind for kind in KINDS if ring or rank != ends[kind][0]]
    receives = [kind for kind in KINDS if ring or rank != ends[kind][1]]
    transfers.expect(dict.fromkeys(KINDS, count))
    received = []
    for number in range(SENDS_AHEAD):
        for kind in sends:
            transfers.send(kind, message(rank, kind, number))
    dist.barrier()
    for number in range(count - 1):
        for kind in receives:
            received.append((transfers.receive(kind, FORMS), message(sources[kind], kind, number)))
        for kind in sends if number + SENDS_AHEAD < count else []:
            transfers.send(kind, message(rank, kind, number + SENDS_AHEAD))
    transfers.finish()  # of the last message, whose receive is posted
    dist.barrier()
    received += [(transfers.receive(kind, FORMS), message(sources[kind], kind, count - 1)) for kind in receives]
    same = all(torch.equal(a, b) for got, want in received for a, b in zip(got, want, strict=True))
    return same, len(received)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sends_and_receives_do_not_wait_for_each_other(pool, ranks):
    for ring in (False, True):
        found = pool.run(exchange, ranks, ring, 5)
        assert all(same for same, _ in found)
        assert sum(count for _, count in found) == 2 * 5 * (ranks if ring else ranks - 1)
