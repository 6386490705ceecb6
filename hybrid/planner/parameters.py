"""The parameters of each rank, in the order of the model, and the buckets the optimizer lays them in."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hybrid.optim.layout import BucketLayout, build_layout
from hybrid.planner.layer import products
from hybrid.planner.workload import Workload

Axis = Literal["sequence", "kv", "tied"]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a rank: its size, and the elements whose gradient other ranks hold in parts."""

    numel: int
    partial: tuple[int, int] | None = None
    axis: Axis | None = None


def _layer(w: Workload) -> Iterator[Parameter]:
    """A decoder layer's, in order of registration: norm, qkv, o, norm, gate and up, down."""
    h, q, kv, f = w.model.hidden_size, w.local_q, w.local_kv, w.local_mlp
    shared: Axis | None = "sequence" if w.sequence_sharded else None
    replicated = w.model.num_key_value_heads < w.t
    norm = Parameter(h, (0, h), shared)

    def fused(columns: int) -> Parameter:
        return Parameter((q + 2 * kv) * columns, (q * columns, (q + 2 * kv) * columns), "kv" if replicated else None)

    yield norm
    yield fused(h)
    if w.model.attention_bias:
        yield fused(1)
    yield Parameter(h * q)
    if w.model.attention_bias:
        yield norm
    yield norm
    yield Parameter(2 * f * h)
    if w.model.mlp_bias:
        yield Parameter(2 * f)
    yield Parameter(h * f)
    if w.model.mlp_bias:
        yield norm


def _adapters(w: Workload) -> Iterator[Parameter]:
    """The matrices A and B of a decoder layer, product by product; the one that is not cut is held whole."""
    assert w.lora is not None, "a run without adapters trains its weights"
    shared: Axis | None = "sequence" if w.sequence_sharded else None
    for product in products(w):
        if not product.adapted:
            continue
        a, b = product.rank * product.width, w.lora.r * sum(product.adapted.values())
        whole = (0, a if product.column else b)
        if product.column:
            kv = w.lora.r * sum(product.adapted.get(name, 0) for name in ("k_proj", "v_proj"))
            yield Parameter(a, whole, shared)
            yield Parameter(b, (b - kv, b), "kv" if w.model.num_key_value_heads < w.t else None)
        else:
            yield Parameter(a)
            yield Parameter(b, whole, shared)


def _vocabulary(w: Workload, tensor_rank: int) -> Parameter:
    """The embedding or the head."""
    h, rows = w.model.hidden_size, w.local_vocab
    if not w.model.tie_word_embeddings or w.p == 1:
        return Parameter(rows * h)
    true_rows = max(0, min(w.model.vocab_size, (tensor_rank + 1) * rows) - min(w.model.vocab_size, tensor_rank * rows))
    return Parameter(rows * h, (0, true_rows * h), "tied")


def _weights(w: Workload, stage: int, tensor_rank: int = 0) -> list[Parameter]:
    """The model's parameters of a stage in forward order; a shared one at its first use."""
    h = w.model.hidden_size
    parameters = []
    if stage == 0:
        parameters.append(_vocabulary(w, tensor_rank))
    parameters += [parameter for _ in range(w.layers(stage)) for parameter in _layer(w)]
    if stage == w.p - 1:
        parameters.append(Parameter(h, (0, h), "sequence" if w.sequence_sharded else None))
        if not (w.model.tie_word_embeddings and w.p == 1):
            parameters.append(_vocabulary(w, tensor_rank))
    return parameters


def stage_parameters(w: Workload, stage: int, tensor_rank: int = 0) -> list[Parameter]:
    """The parameters that a rank trains, in forward order: the adapters, or without them the model's."""
    if w.lora is not None:
        return list(_adapters(w)) * w.layers(stage)
    return _weights(w, stage, tensor_rank)


def num_stage_parameters(w: Workload, stage: int) -> int:
    """Elements that a rank trains, vocabulary padding included."""
    return sum(parameter.numel for parameter in stage_parameters(w, stage))


def frozen_elements(w: Workload, stage: int) -> int:
    """Elements that a rank holds and does not train, vocabulary padding included."""
    return 0 if w.lora is None else sum(parameter.numel for parameter in _weights(w, stage))


def largest_stage(w: Workload) -> int:
    """Elements that the rank that has most of them trains."""
    return max(num_stage_parameters(w, stage) for stage in range(w.p))


@dataclass(frozen=True)
class _Kind:
    """What a stage's buckets depend on."""

    layer: tuple[int, ...]
    """Sizes of what is trained of a layer."""
    layers: tuple[int, ...]
    """Of each stage of the rank."""
    vocabulary: int
    hidden: int
    first: bool
    """The embedding is trained here."""
    last: bool
    """Final norm and head are."""
    tied: bool
    bucket_size: int
    shards: int


@functools.lru_cache(maxsize=1024)
def _layout(kind: _Kind) -> BucketLayout:
    shared = kind.tied and kind.first and kind.last
    sizes = [kind.hidden] * kind.last + list(kind.layer[::-1]) * sum(kind.layers)
    alone = set()
    if kind.last and not shared:
        sizes.insert(0, kind.vocabulary)
        alone.add(0)
    # Backward begins with the last stage; a stage shares no bucket with another.
    head = len(sizes) - sum(kind.layers) * len(kind.layer)
    begins = {head + sum(kind.layers[chunk:]) * len(kind.layer) for chunk in range(1, len(kind.layers))}
    if kind.first:
        alone.add(len(sizes))
        sizes.append(kind.vocabulary)
    return build_layout(
        sizes,
        bucket_size=kind.bucket_size,
        num_shards=kind.shards,
        alone=frozenset(alone if kind.tied else ()),
        first=frozenset(begins),
    )


def _kind(w: Workload, stage: int) -> _Kind:
    trained, whole = (_layer(w), True) if w.lora is None else (_adapters(w), False)
    return _Kind(
        layer=tuple(parameter.numel for parameter in trained),
        layers=w.chunk_layers(stage),
        vocabulary=w.local_vocab * w.model.hidden_size,
        hidden=w.model.hidden_size,
        first=whole and stage == 0,
        last=whole and stage == w.p - 1,
        tied=w.model.tie_word_embeddings,
        bucket_size=w.bucket_size,
        shards=w.d if w.zero_stage > 0 else 1,
    )


def bucket_layout(w: Workload, stage: int) -> BucketLayout:
    """The optimizer's buckets: items in the order in which backward makes their gradients."""
    return _layout(_kind(w, stage))


@dataclass(frozen=True)
class BucketSizes:
    """Elements of a stage's buckets, padding included."""

    total: int
    shard: int
    """Of one shard of every bucket."""
    largest: int
    """Of the largest bucket."""


@functools.lru_cache(maxsize=1024)
def _sizes(kind: _Kind) -> BucketSizes:
    buckets = _layout(kind).buckets
    return BucketSizes(
        total=sum(bucket.numel for bucket in buckets),
        shard=sum(bucket.shard_numel for bucket in buckets),
        largest=max((bucket.numel for bucket in buckets), default=0),
    )


def bucket_sizes(w: Workload, stage: int) -> BucketSizes:
    """The sums over `bucket_layout`, which a search asks for again and again."""
    return _sizes(_kind(w, stage))


@functools.lru_cache(maxsize=1024)
def _owned(kind: _Kind, shard: int) -> int:
    return sum(piece.numel for piece in _layout(kind).pieces(shard))


def owned_elements(w: Workload, stage: int, data_rank: int) -> int:
    """Elements whose master copy and moments a rank keeps."""
    return _owned(_kind(w, stage), data_rank if w.zero_stage > 0 else 0)
