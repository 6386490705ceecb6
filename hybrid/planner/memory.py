"""Bytes of one rank, part by part: what the optimizer holds exactly, what a step needs beside by the layer formulas."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hybrid.pipeline.rounds import SENDS_AHEAD
from hybrid.planner import formulas
from hybrid.planner.parameters import bucket_sizes, frozen_elements, owned_elements
from hybrid.planner.workload import BYTES, Workload

_BUFFERS = 2
"""Bucket buffers alive when every microbatch is reduced: one fills while the other is on the wire."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes at the fullest moment of a step."""

    parameters: int
    """Those that are trained."""
    frozen: int
    """Weights that are not."""
    gradients: int
    states: int
    """Master weights and moments; of an fp32 model the moments alone."""
    buckets: int
    """Buffers gradients pass through on their way to their shard."""
    wire: int
    """Copies of buckets on the wire, where gradients travel in a narrower dtype."""
    activations: int
    """Of all microbatches in flight, with the tensors the pipeline keeps between stages."""
    logits: int
    """What the fused loss holds and needs: gradients of head and hidden states, and a chunk's logits."""
    working: int
    """What the backward of a layer needs while it runs."""

    @property
    def total(self) -> int:
        """All parts. Loss and layer do not run at once: the larger of the two counts."""
        return self.held + self.wire + self.activations + max(self.logits, self.working)

    @property
    def held(self) -> int:
        """What stays between steps."""
        return self.parameters + self.frozen + self.gradients + self.states + self.buckets

    def to_dict(self) -> dict[str, int]:
        """The parts and their total."""
        return {**asdict(self), "total": self.total}


def optimizer_memory(w: Workload, stage: int, data_rank: int = 0) -> dict[str, int]:
    """`parameters`, `frozen`, `gradients`, `states` and `buckets` of a rank, exactly, alignment included.

    With N trained elements in the buckets, d data-parallel ranks, bf16 and Adam: parameters 2 N; gradients 4 N in a
    full fp32 buffer, or 4 N / d where every microbatch is reduced; states 12 N / d (d = 1 under stage 0). The table of
    Rajbhandari et al. 2020 (arXiv:1910.02054, section 3) with fp32 gradients.
    """
    sizes = bucket_sizes(w, stage)
    by_microbatch = w.zero_stage == 2 and w.gradient_sharding == "microbatch" and w.d > 1
    owned = owned_elements(w, stage, data_rank)
    kinds = w.optimizer_states + (0 if w.precision == "fp32" else 1)
    return {
        "parameters": w.width * sizes.total,
        "frozen": w.width * frozen_elements(w, stage),
        "gradients": 4 * (sizes.shard if by_microbatch else sizes.total),
        "states": 4 * kinds * owned,
        "buckets": _BUFFERS * BYTES[w.wire] * sizes.largest if by_microbatch else 0,
    }


def microbatch_activations(w: Workload, stage: int, chunk: int = 0) -> int:
    """Bytes a rank keeps of a microbatch between forward and backward of one of its stages; the fused loss's aside."""
    kept = sum(count * formulas.layer_activations(w, *kind) for kind, count in w.layer_kinds(stage, chunk).items())
    if stage == 0 and chunk == 0:
        kept += formulas.embedding_activations(w)
    if stage == w.p - 1 and chunk == w.chunks - 1:
        return kept + formulas.final_norm_activations(w)
    return kept + _stream(w)  # the output, which waits for its gradient


def _stream(w: Workload) -> int:
    return w.held_tokens * w.model.hidden_size * w.width


def rank_memory(w: Workload, stage: int, data_rank: int = 0) -> RankMemory:
    """What a rank of `stage` needs.

    The pipeline posts the receive of the next hidden states, and that of the next gradient, ahead, and keeps gradients
    that it sends until they are received; sent hidden states wait for their gradient anyway.
    """
    in_flight = w.in_flight(stage)
    sent = min(SENDS_AHEAD, w.chunks * w.micro_batches - max(map(sum, in_flight)))
    before, behind = stage > 0 or w.chunks > 1, stage < w.p - 1 or w.chunks > 1
    between = _stream(w) * ((1 + sent) * before + behind)
    sizes = [microbatch_activations(w, stage, chunk) for chunk in range(w.chunks)]
    held = max(sum(n * size for n, size in zip(counts, sizes, strict=True)) for counts in in_flight)
    activations = held + between + formulas.rope_tables(w)
    working = formulas.layer_transient(w)
    if w.recomputing(stage) and w.recompute == "full":
        working += formulas.layer_activations(w, "none") - formulas.layer_activations(w, "full")
    last = stage == w.p - 1
    logits = formulas.head_kept(w) + formulas.head_transient(w) if last else 0
    return RankMemory(
        **optimizer_memory(w, stage, data_rank),
        wire=_on_the_wire(w, stage),
        activations=activations,
        logits=logits,
        working=working,
    )


def _on_the_wire(w: Workload, stage: int) -> int:
    """Two buckets travel at once; each needs room to arrive, and a narrow copy where its buffer is fp32."""
    if w.wire == "fp32" or w.zero_stage == 0 or w.d == 1:
        return 0
    copies = 1 if w.zero_stage == 2 and w.gradient_sharding == "microbatch" else 2
    return _BUFFERS * copies * BYTES[w.wire] * bucket_sizes(w, stage).largest


def fullest_stage(w: Workload) -> tuple[int, RankMemory]:
    """The stage whose ranks need most, and what they need."""
    plans = [(stage, rank_memory(w, stage)) for stage, _ in w.distinct_stages()]
    return max(plans, key=lambda plan: plan[1].total)
