"""How long a step should take, part by part, from the formulas, the GPU's datasheet and one set of efficiencies.

A GEMM takes max(2 m n k / (gemm peak), bytes / (memory bandwidth)) + latency; attention its operations at its own
fraction of the peak; everything elementwise its bytes at the memory's bandwidth, with fused kernels. A ring collective
takes wire bytes / (link bandwidth) + latency. What hides behind what is this package's order (see linear.py,
gradients.py, parameters.py):

* tensor axis: exposed forward; in backward the sum of a column-parallel product's input gradients hides behind the
  weight's GEMM, and the gather of its input behind the input's GEMM; the gather of a row-parallel gradient is exposed.
  Of frozen weights there is no such GEMM and no such gather, and what adapters exchange is exposed.
* data axis: the reduction behind the last microbatch's backward (every microbatch's under stage 2), the gather behind
  the first forward; of either one bucket always stays exposed.
* pipeline, 1F1B (Narayanan et al. 2021, arXiv:2104.04473, section 2.2): m slots of the slowest stage, and the bubble,
  one slot of every other stage, divided by the stages a rank holds. Sends are exposed.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.metrics.flops import flops_per_token
from hybrid.planner import formulas
from hybrid.planner.hardware import Gpu
from hybrid.planner.layer import Gemm, products
from hybrid.planner.parameters import owned_elements
from hybrid.planner.traffic import Transfer, data_transfers, pipeline_transfers
from hybrid.planner.workload import LayerKind, Workload

_ACCUMULATE_BYTES = 10
"""Per weight and microbatch: a gradient is read in bf16 and added to an fp32 buffer."""
_SCORE_BYTES, _SCORE_BYTES_BACKWARD = 13, 19
"""Per score, where attention is not blockwise: half-precision reads and writes, dropout's mask a byte."""
_STEP_BYTES = 38
"""Per owned weight and step: gradient scaled (8), read (4), master and moments read and written (24), weight (2)."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step, as the slowest stage spends them."""

    compute: float
    """GEMMs, attention and elementwise kernels of all microbatches, recomputation included."""
    tensor: float
    """Exposed communication of tensor and sequence parallelism."""
    bubble: float
    pipeline: float
    """Exposed sends between stages."""
    data: float
    """Exposed reduction of gradients and gather of weights."""
    optimizer: float

    @property
    def total(self) -> float:
        return self.compute + self.tensor + self.bubble + self.pipeline + self.data + self.optimizer


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A step's time, and the rates that follow."""

    time: StepTime
    tokens_per_second: float
    """Per GPU."""
    tflops: float
    """Model FLOPs per GPU and second, in units of 1e12."""
    mfu: float


@dataclass(frozen=True)
class _Slot:
    """Seconds of one microbatch on one stage."""

    forward: float
    backward: float
    forward_tensor: float
    backward_tensor: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.forward_tensor + self.backward_tensor


@dataclass(frozen=True, kw_only=True)
class Practice:
    """How a published run differs from what this package does."""

    interleave: int = 1
    """Virtual stages per stage, which divide the bubble."""
    blockwise: bool = True
    """Attention without the s x s scores in memory."""


PLAIN = Practice()


class _Clock:
    """Seconds of the elementary operations on one GPU."""

    def __init__(self, gpu: Gpu, w: Workload, practice: Practice) -> None:
        self.gpu, self.w, self.e, self.blockwise = gpu, w, gpu.efficiency, practice.blockwise
        self.peak = gpu.matrix_flops

    def gemm(self, gemm: Gemm) -> float:
        moved = self.w.width * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n) * gemm.count
        busy = max(gemm.flops / (self.peak * self.e.gemm), self.elementwise(moved))
        return busy + gemm.count * self.e.gemm_latency

    def attention(self, *, backward: bool) -> float:
        flops = formulas.attention_flops(self.w)
        if self.blockwise:
            return flops * (formulas.ATTENTION_BACKWARD if backward else 1.0) / (self.peak * self.e.attention)
        # The whole square; its scores are written and read by products, softmax and dropout.
        scores = self.w.model.num_attention_heads // self.w.t * self.w.tokens * self.w.seq_length
        products = 2 * flops * (2 if backward else 1) / (self.peak * self.e.gemm)
        return products + self.elementwise((_SCORE_BYTES_BACKWARD if backward else _SCORE_BYTES) * scores)

    def elementwise(self, moved: float) -> float:
        return moved / (self.gpu.memory_gb_per_second * 1e9 * self.e.memory)

    def bandwidth(self, span: int, per_node: int) -> float:
        """Bytes per second of a ring over ranks `span` apart at most, `per_node` of them in each node."""
        if span <= self.gpu.gpus_per_node:
            return self.gpu.link_gb_per_second * 1e9 * self.e.link
        # All ranks of a node that share the ring's way out add their network ports.
        ports = min(self.gpu.link_gb_per_second, self.gpu.network_gb_per_second * max(1, per_node))
        return ports * 1e9 * self.e.link

    def transfer(self, x: Transfer, span: int, per_node: int = 1) -> float:
        """Seconds of one of the transfer's collectives."""
        start = self.e.latency + self.e.hop * (x.group_size - 1)
        return x.wire_bytes / x.count / self.bandwidth(span, per_node) + start


def _elementwise_bytes(w: Workload) -> float:
    """Bytes that norms, residual additions, RoPE, SwiGLU and the sums of adapters of a layer's forward move."""
    e, h = w.width, w.model.hidden_size
    norms = 2 * (2 + 3) * w.held_tokens * h * e
    rotary = 2 * (w.local_q + 2 * w.local_kv) * w.tokens * e
    adapters = sum(3 * product.rows for product in products(w) if product.adapted) * w.tokens * e
    return norms + rotary + adapters + 3 * w.local_mlp * w.tokens * e


def _layer(clock: _Clock, w: Workload, kind: LayerKind) -> _Slot:
    gemms = formulas.layer_gemms(w)
    moved = clock.elementwise(_elementwise_bytes(w))
    forward = sum(clock.gemm(g) for g in gemms) + clock.attention(backward=False) + moved
    backward = sum(clock.gemm(g) for g in formulas.layer_backward_gemms(w, kind.leading))
    backward += clock.attention(backward=True) + 2 * moved
    trained = [
        g for product in products(w) for g in ([product.gemm(w)] if w.lora is None else product.adapter_gemms(w))
    ]
    backward += clock.elementwise(_ACCUMULATE_BYTES * sum(g.n * g.k for g in trained))
    exposed_forward, exposed_backward = _tensor_seconds(clock, w)
    if kind.recompute == "full":
        backward += forward
        exposed_backward += exposed_forward
    elif kind.recompute == "selective":
        stream = w.held_tokens * w.model.hidden_size * w.width
        backward += clock.elementwise(4 * stream + 3 * w.local_mlp * w.tokens * w.width)
        if not clock.blockwise:
            backward += clock.attention(backward=False)
    return _Slot(forward, backward, exposed_forward, exposed_backward)


def _tensor_seconds(clock: _Clock, w: Workload) -> tuple[float, float]:
    """Exposed seconds of a layer's collectives, forward and backward."""
    if w.t == 1:
        return 0.0, 0.0

    def seconds(op: str, width: int) -> float:
        payload = w.tokens * width * w.width
        return clock.transfer(Transfer(axis="tensor", op=op, group_size=w.t, payload=payload), w.t)

    def gather(width: int) -> float:
        return seconds("all_gather", width) if w.sequence_sharded else 0.0

    def reduce(width: int) -> float:
        return seconds("reduce_scatter" if w.sequence_sharded else "all_reduce", width)

    forward = backward = 0.0
    for product in products(w):
        there, back = (gather, reduce) if product.column else (reduce, gather)
        forward += there(w.model.hidden_size)
        exposed = back(w.model.hidden_size)
        if product.column and w.lora is None:
            by_input, by_weight = (clock.gemm(g) for g in formulas.backward_gemms(product.gemm(w)))
            exposed = max(0.0, exposed - by_weight) + max(0.0, gather(w.model.hidden_size) - by_input)
        backward += exposed
        if product.adapted:
            forward, backward = forward + there(product.rank), backward + back(product.rank)
    return forward, backward


def _stage(clock: _Clock, w: Workload, stage: int) -> _Slot:
    """One microbatch on a stage."""
    counts = [(_layer(clock, w, kind), count) for kind, count in w.layer_kinds(stage).items()]
    forward = sum(slot.forward * count for slot, count in counts)
    backward = sum(slot.backward * count for slot, count in counts)
    exposed = [sum(slot.forward_tensor * n for slot, n in counts), sum(slot.backward_tensor * n for slot, n in counts)]
    stream = w.held_tokens * w.model.hidden_size * w.width
    if stage == 0:
        forward += clock.elementwise(2 * w.tokens * w.model.hidden_size * w.width)
        if w.lora is None:
            backward += clock.elementwise(4 * w.local_vocab * w.model.hidden_size + 8 * stream)
    if stage == w.p - 1:
        logits = w.tokens * w.local_vocab
        forward += sum(clock.gemm(g) for g in formulas.head_gemms(w)) + clock.elementwise((6 * w.width + 8) * logits)
        if w.lora is None:
            backward += clock.elementwise(14 * w.local_vocab * w.model.hidden_size)
    return _Slot(forward, backward, *exposed)


def _data_seconds(clock: _Clock, w: Workload, stage: int, slot: _Slot) -> float:
    """Exposed seconds of a step on the data axis."""
    transfers = data_transfers(w, stage)
    if not transfers:
        return 0.0
    per_node = max(1, clock.gpu.gpus_per_node // w.t)
    reduce = [(x, clock.transfer(x, w.d * w.t, per_node)) for x in transfers if x.op != "all_gather"]
    gather = [clock.transfer(x, w.d * w.t, per_node) for x in transfers if x.op == "all_gather"]
    reducing, times = sum(seconds for _, seconds in reduce), reduce[0][0].count
    last = max(seconds for _, seconds in reduce)
    backward, forward = slot.backward + slot.backward_tensor, slot.forward + slot.forward_tensor
    exposed = last + times * max(0.0, reducing - last - backward)
    if gather:
        exposed += max(gather) + max(0.0, sum(gather) - max(gather) - forward) if w.overlap else sum(gather)
    return exposed


def estimate(w: Workload, gpu: Gpu, practice: Practice = PLAIN) -> Estimate:
    """Time and rates of a step of `w` on `gpu`."""
    clock = _Clock(gpu, w, practice)
    slots = {stage: (_stage(clock, w, stage), count) for stage, count in w.distinct_stages()}
    slowest = max(slots, key=lambda stage: slots[stage][0].total)
    slot, m = slots[slowest][0], w.micro_batches
    sends = sum(
        clock.transfer(x, gpu.gpus_per_node + (w.parallel.world_size > gpu.gpus_per_node)) * x.count
        for x in pipeline_transfers(w, slowest)
    )
    time = StepTime(
        compute=m * (slot.forward + slot.backward),
        tensor=m * (slot.forward_tensor + slot.backward_tensor),
        bubble=(sum(other.total * count for other, count in slots.values()) - slot.total)
        / (practice.interleave * w.chunks),
        pipeline=m * sends,
        data=_data_seconds(clock, w, slowest, slot),
        optimizer=clock.elementwise(_STEP_BYTES * owned_elements(w, slowest, 0)) + 4 * clock.e.latency,
    )
    world = w.parallel.world_size
    rate = w.step_tokens / time.total / world
    flops = rate * flops_per_token(w.model, w.seq_length, frozen=w.lora is not None)
    return Estimate(time=time, tokens_per_second=rate, tflops=flops / 1e12, mfu=flops / gpu.matrix_flops)
