"""Every collective and send of one rank in one step: what the meter will count.

Per microbatch, with the payload T h e of the hidden states (see formulas.py):

    tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053, section 3): 2 all-reduces a layer forward, 2 backward,
        2 more where a layer is recomputed; 1 after the embedding; 1 in the loss, for the gradient of its input.
    with sequence parallelism (Korthikanti et al. 2022, section 4.2.2): each all-reduce becomes a reduce-scatter and an
        all-gather, and the backward gathers the inputs of the two column-parallel products once more.
    the loss: per chunk of n tokens a maximum (4 n bytes) and a sum (8 n bytes) over the vocabulary's ranks.
    adapters of n projections of a product and rank r: what its activations do, T n r e wide, in each direction. The
        backward of frozen weights gathers no inputs, and nothing before the first adapter has a gradient.
    pipeline: T' h e forward to the next stage, as many back, for each stage that a rank holds.

Per step, with the buckets' N trained elements: the data-parallel axis moves 4 N (fp32 gradients) into a reduce-scatter,
once or once a microbatch, and e N out of an all-gather; stage 0 an all-reduce of 4 N. What replicas hold in parts
(under sequence parallelism norms and what is whole of adapters, replicated key/value heads, tied embeddings) is summed
once on the reduced shards. One all-reduce of six fp64 numbers over the world carries norm, overflow, loss and flags.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from hybrid.config.parallel import kv_replicas
from hybrid.planner.formulas import loss_chunks
from hybrid.planner.layer import inputs_wanted, products
from hybrid.planner.parameters import bucket_layout, stage_parameters
from hybrid.planner.workload import BYTES, LayerKind, Workload

_STEP_NUMBERS = 6
"""fp64: square sum, overflow, loss, tokens, and two flags of the run."""

_PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""Times the payload goes round a ring, but for the one part that each rank has already (Thakur et al. 2005)."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """`count` collectives or sends of one rank, alike."""

    axis: str
    """`tensor`, `data`, `pipe`, `kv`, `embedding` or `world`."""
    op: str
    group_size: int
    """Ranks that take part."""
    payload: int
    """Bytes of the whole tensor: the input of a reduction, the output of a gather."""
    count: int = 1

    @property
    def wire_bytes(self) -> float:
        """Bytes this rank sends, with ring algorithms."""
        if self.op == "send":
            return float(self.payload * self.count)
        return _PASSES[self.op] * (self.group_size - 1) / self.group_size * self.payload * self.count


def layer_collectives(w: Workload, kind: LayerKind) -> Counter[tuple[str, int]]:
    """(operator, payload) of what one layer issues on the tensor axis in a microbatch."""
    if w.t == 1:
        return Counter()
    gather, reduce = ("all_gather", "reduce_scatter") if w.sequence_sharded else ("", "all_reduce")
    forward: Counter[tuple[str, int]] = Counter()
    backward: Counter[tuple[str, int]] = Counter()
    hidden = w.tokens * w.model.hidden_size * w.width
    for product, wanted in zip(products(w), inputs_wanted(w, kind.leading), strict=True):
        there, back = (gather, reduce) if product.column else (reduce, gather)
        forward[there, hidden] += 1
        backward[back, hidden] += wanted
        backward[gather, hidden] += product.column and w.lora is None
        if product.adapted:
            inner = w.tokens * product.rank * w.width
            forward[there, inner] += 1
            backward[back, inner] += 1
    issued = backward + forward + (forward if kind.recompute == "full" else Counter())
    return Counter({key: count for key, count in issued.items() if key[0]})


def tensor_transfers(w: Workload, stage: int) -> list[Transfer]:
    """What a rank moves on the tensor axis in one microbatch."""
    if w.t == 1:
        return []
    counts: Counter[tuple[str, int]] = Counter()
    for kind, layers in w.layer_kinds(stage).items():
        for key, count in layer_collectives(w, kind).items():
            counts[key] += layers * count
    last, hidden = stage == w.p - 1, w.tokens * w.model.hidden_size * w.width
    ends = (stage == 0) + last
    if w.sequence_sharded:
        counts["reduce_scatter", hidden] += ends
        # Of the loss forward; of the embedding backward, if it is trained.
        counts["all_gather", hidden] += last + (stage == 0 and w.lora is None)
    else:
        counts["all_reduce", hidden] += ends
    transfers = [_tensor(w, op, payload, count) for (op, payload), count in sorted((+counts).items())]
    if last:
        for size, count in sorted(Counter(loss_chunks(w)).items()):
            transfers += [_tensor(w, "all_reduce", 4 * size, count), _tensor(w, "all_reduce", 8 * size, count)]
    return transfers


def _tensor(w: Workload, op: str, payload: int, count: int) -> Transfer:
    return Transfer(axis="tensor", op=op, group_size=w.t, payload=payload, count=count)


def pipeline_transfers(w: Workload, stage: int) -> list[Transfer]:
    """What a rank sends to its neighbours in one microbatch."""
    # Each stage of the rank sends two ways, but the model's first not back and its last not on.
    sends = 2 * w.chunks - (stage == 0) - (stage == w.p - 1)
    payload = w.held_tokens * w.model.hidden_size * w.width
    return [Transfer(axis="pipe", op="send", group_size=2, payload=payload, count=sends)] if sends else []


def data_transfers(w: Workload, stage: int) -> list[Transfer]:
    """What a rank moves on the data axis in one step."""
    if w.d == 1:
        return []
    by_microbatch = w.zero_stage == 2 and w.gradient_sharding == "microbatch"
    times = w.micro_batches if by_microbatch else 1
    transfers = []
    for bucket in bucket_layout(w, stage).buckets:

        def move(op: str, width: int, count: int, numel: int = bucket.numel) -> Transfer:
            return Transfer(axis="data", op=op, group_size=w.d, payload=width * numel, count=count)

        if w.zero_stage == 0:
            transfers.append(move("all_reduce", 4, 1))
        else:
            transfers.append(move("reduce_scatter", BYTES[w.wire], times))
            transfers.append(move("all_gather", w.width, 1))
    return transfers


def replica_transfers(w: Workload, stage: int, tensor_rank: int, data_rank: int) -> list[Transfer]:
    """Sums of gradients that replicas hold in parts, on this rank's shard, once a step."""
    parameters = stage_parameters(w, stage, tensor_rank)[::-1]
    numel: Counter[str] = Counter()
    for piece in bucket_layout(w, stage).pieces(data_rank if w.zero_stage > 0 else 0):
        parameter = parameters[piece.index]
        if parameter.axis is not None and parameter.partial is not None:
            start, stop = parameter.partial
            numel[parameter.axis] += max(0, min(stop, piece.stop) - max(start, piece.start))
    groups = {
        "sequence": ("tensor", w.t),
        "kv": ("kv", kv_replicas(w.model.num_key_value_heads, w.t)),
        "tied": ("embedding", 2),
    }
    transfers = []
    for part, count in numel.items():
        axis, size = groups[part]
        if count:
            transfers.append(Transfer(axis=axis, op="all_reduce", group_size=size, payload=4 * count))
    return transfers


def step_transfers(w: Workload, stage: int, tensor_rank: int = 0, data_rank: int = 0) -> list[Transfer]:
    """Everything a rank moves in one step whose gradients are finite."""
    per_microbatch = [*tensor_transfers(w, stage), *pipeline_transfers(w, stage)]
    transfers = [
        Transfer(axis=x.axis, op=x.op, group_size=x.group_size, payload=x.payload, count=x.count * w.micro_batches)
        for x in per_microbatch
    ]
    transfers += [*data_transfers(w, stage), *replica_transfers(w, stage, tensor_rank, data_rank)]
    world = w.parallel.world_size
    if world > 1:
        transfers.append(Transfer(axis="world", op="all_reduce", group_size=world, payload=8 * _STEP_NUMBERS))
    return transfers


def summarize(transfers: Iterable[Transfer]) -> dict[str, dict[str, dict[str, int]]]:
    """axis -> op -> `{"calls", "payload_bytes", "wire_bytes"}`, as the meter's summary."""
    summary: dict[str, dict[str, dict[str, int]]] = {}
    for x in transfers:
        entry = summary.setdefault(x.axis, {}).setdefault(x.op, {"calls": 0, "payload_bytes": 0, "wire_bytes": 0})
        entry["calls"] += x.count
        entry["payload_bytes"] += x.count * x.payload
        entry["wire_bytes"] += round(x.wire_bytes)
    return summary
