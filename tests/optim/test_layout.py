"""Buckets and shards: every element in exactly one shard, at any size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.optim.layout import build_layout

sizes = st.lists(st.integers(1, 400), min_size=1, max_size=12)


@given(
    sizes=sizes,
    bucket_size=st.integers(1, 1500),
    num_shards=st.integers(1, 9),
    alignment=st.sampled_from([1, 3, 16, 64]),
    data=st.data(),
)
def test_every_element_in_exactly_one_shard(sizes, bucket_size, num_shards, alignment, data):
    alone = frozenset(data.draw(st.sets(st.integers(0, len(sizes) - 1))))
    layout = build_layout(sizes, bucket_size=bucket_size, num_shards=num_shards, alone=alone, alignment=alignment)
    owners = [[0] * size for size in sizes]
    cells: set[tuple[int, int]] = set()
    for shard in range(num_shards):
        for piece in layout.pieces(shard):
            bucket = layout.buckets[piece.bucket]
            low, high = bucket.shard_range(shard)
            assert low <= piece.bucket_start and piece.bucket_start + piece.numel <= high
            for offset in range(piece.numel):
                owners[piece.index][piece.start + offset] += 1
                cell = (piece.bucket, piece.bucket_start + offset)
                assert cell not in cells
                cells.add(cell)
    assert all(count == 1 for item in owners for count in item)


@given(sizes=sizes, bucket_size=st.integers(1, 1500), num_shards=st.integers(1, 9))
def test_buckets_keep_the_order_and_hold_whole_items(sizes, bucket_size, num_shards):
    layout = build_layout(sizes, bucket_size=bucket_size, num_shards=num_shards)
    order = [item.index for bucket in layout.buckets for item in bucket.placements]
    assert order == list(range(len(sizes)))
    for bucket in layout.buckets:
        assert bucket.numel % (64 * num_shards) == 0
        assert len({bucket.shard_range(s)[1] - bucket.shard_range(s)[0] for s in range(num_shards)}) == 1
        assert all(item.start % 64 == 0 and item.numel == sizes[item.index] for item in bucket.placements)
        # A bucket is over its size only where one item is.
        assert len(bucket.placements) == 1 or bucket.placements[-1].stop <= bucket_size


def test_an_item_can_be_kept_alone():
    layout = build_layout([10, 20, 30, 40], bucket_size=1000, num_shards=2, alone=frozenset({2}))
    assert [[item.index for item in bucket.placements] for bucket in layout.buckets] == [[0, 1], [2], [3]]


def test_padding_is_small_for_real_sizes():
    llama_7b_layer = [4096 * 4096 * 3, 4096 * 4096, 2 * 11008 * 4096, 11008 * 4096, 4096, 4096]
    layout = build_layout(llama_7b_layer * 32, bucket_size=40_000_000, num_shards=48)
    assert layout.numel <= 1.001 * sum(llama_7b_layer) * 32


@pytest.mark.parametrize("bad", [{"bucket_size": 0}, {"num_shards": 0}, {"sizes": [3, 0]}])
def test_refuses_what_is_not_positive(bad):
    arguments = {"sizes": [3], "bucket_size": 10, "num_shards": 1, **bad}
    with pytest.raises(ValueError, match="must be positive"):
        build_layout(arguments.pop("sizes"), **arguments)
