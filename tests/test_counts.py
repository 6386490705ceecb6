"""What decides the speed on a cluster, counted exactly: bytes, overlap, activations, operators, FLOPs."""

import pytest
import torch
import torch.distributed as dist
from support.llama import make_batches, make_engine, my_batches, reference_model, small_config
from support.tracer import Tracer

from hybrid.config.layout import balanced_split
from hybrid.metrics.flops import matmul_parameters
from hybrid.metrics.meter import TrafficMeter
from hybrid.model.block import TransformerBlock
from hybrid.model.init import init_parameters
from hybrid.model.packing import Documents
from hybrid.model.rope import rope_tables
from hybrid.tensor_parallel.context import TensorParallel

SEQ = 64
BF16 = 2
# Proportions of a small LLaMA: f / h = 2.75, half as many key/value heads, a head that weighs as much as 1.4 layers.
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
}


def engine_and_batches(model, micro_batches, steps, seq=SEQ, **layout):
    config = small_config(**model)
    engine, grid = make_engine(config, micro_batches=micro_batches, batch=1, seq=seq, dtype=torch.bfloat16, **layout)
    count = steps * micro_batches * grid.parallel.data_parallel_size
    batches = my_batches(make_batches(count, 1, seq, config.vocab_size, masked=False), grid, micro_batches)
    return engine, grid, iter(batches)


def wire(model, micro_batches, layout):
    """The calls of the second step: the first also tells shapes to the next stage."""
    engine, grid, batches = engine_and_batches(model, micro_batches, 2, bucket_size=200_000, **layout)
    engine.train_batch(batches)
    with TrafficMeter(grid) as meter:
        engine.train_batch(batches)
        engine.optimizer.wait_parameters()
    numel = sum(param.numel() for param in engine.module.parameters())
    return numel, meter.calls


def total(calls, axis):
    return sum(call.wire_bytes for call in calls if call.axis == axis)


HIDDEN_BYTES = BF16 * SEQ * MODEL["hidden_size"]
"""Of the hidden states of a microbatch."""


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_bytes(pool, sequence_parallel):
    micro_batches, layers = 2, MODEL["num_hidden_layers"]
    # Two sums a layer in forward and two in backward, the embedding's and the head's (Shoeybi et al. 2019); a ring
    # moves a sum's bytes once at two ranks. Sequence parallelism gathers two inputs a layer again for the weights.
    minimum = micro_batches * (4 * layers + 2) * HIDDEN_BYTES
    again = micro_batches * 2 * layers * HIDDEN_BYTES / 2 if sequence_parallel else 0
    for _, calls in pool.run(wire, 2, MODEL, micro_batches, {"tp": 2, "sp": sequence_parallel}):
        assert minimum + again <= total(calls, "tensor") <= 1.02 * (minimum + again)
        assert total(calls, "tensor") <= (1.25 if sequence_parallel else 1.02) * minimum


def test_pipeline_bytes(pool):
    micro_batches = 4
    for _, calls in pool.run(wire, 2, MODEL, micro_batches, {"pp": 2}):
        assert total(calls, "pipe") == micro_batches * HIDDEN_BYTES


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_data_parallel_bytes(pool, micro_batches, dtype):
    layout = {"stage": 1, "wire_dtype": dtype}
    for numel, calls in pool.run(wire, 2, MODEL, micro_batches, layout):
        # Half of the gradients out, half of the weights in, whatever the number of microbatches.
        minimum = numel * (dtype.itemsize + BF16) / 2
        assert minimum <= total(calls, "data") <= 1.02 * minimum


def collectives_by_layers(layers):
    _, calls = wire({**MODEL, "num_hidden_layers": layers}, 1, {"tp": 2, "sp": True})
    return [(call.op, call.payload, call.dtype) for call in calls if call.axis == "tensor"]


def test_collectives_of_a_sequence_parallel_layer(pool):
    few, many = pool.run(collectives_by_layers, 2, 2), pool.run(collectives_by_layers, 2, 3)
    for less, more in zip(few, many, strict=True):
        added = {call: more.count(call) - less.count(call) for call in set(more)}
        # Korthikanti et al. 2022: two of each in both directions, and in backward the two inputs again.
        large = {call: count for call, count in added.items() if call[1] == HIDDEN_BYTES}
        assert large == {
            ("all_gather", HIDDEN_BYTES, torch.bfloat16): 6,
            ("reduce_scatter", HIDDEN_BYTES, torch.bfloat16): 4,
        }
        # The rest, once a step and in fp32: the loss's statistics, and the gradients of the norms.
        assert all(op == "all_reduce" and size < HIDDEN_BYTES for op, size, dtype in more if dtype != torch.bfloat16)


def traced_step(model, micro_batches, layout, seq=SEQ):
    """Operators and FLOPs of the second step, and its collectives as (axis, op, payload, issued at, hidden FLOPs)."""
    engine, grid, batches = engine_and_batches(model, micro_batches, 2, seq, **layout)
    engine.train_batch(batches)
    engine.optimizer.wait_parameters()
    spans = []
    with Tracer() as tracer:
        begin, end = engine.optimizer.begin_microbatch, engine.optimizer.end_microbatch
        engine.optimizer.begin_microbatch = lambda **which: (spans.append(len(tracer.events)), begin(**which))
        engine.optimizer.end_microbatch = lambda: (spans.append(len(tracer.events)), end())
        engine.train_batch(batches)
        engine.optimizer.wait_parameters()
    groups = {"tensor": grid.tensor_group, "data": grid.data_group}
    axes = {group.group_name: name for name, group in groups.items() if group is not None}
    starts, stops = spans[::2], spans[1::2]
    calls = [
        (
            axes.get(call.group_name, "other"),
            call.op,
            call.payload,
            call.issued_at,
            call.hidden_flops if call.waited_at is not None else None,
            any(start <= index < stop for start, stop in zip(starts, stops, strict=True)),
        )
        for index, call in enumerate(tracer.events)
    ]
    return tracer.operators, tracer.flops, calls


DEEP = {**MODEL, "num_hidden_layers": 16, "vocab_size": 256}
"""The embedding's gradient, the last one of a backward, weighs about 1%."""


def test_gradients_leave_before_the_last_gemm(pool):
    for _, flops, calls in pool.run(traced_step, 2, DEEP, 2, {"stage": 1, "bucket_size": 60_000}):
        reductions = [call for call in calls if call[:2] == ("data", "reduce_scatter")]
        early = sum(payload for _, _, payload, issued_at, _, _ in reductions if issued_at < flops)
        assert early >= 0.95 * sum(call[2] for call in reductions)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_gemm_runs_under_every_tensor_parallel_byte_of_backward(pool, sequence_parallel):
    for _, _, calls in pool.run(traced_step, 2, MODEL, 1, {"tp": 2, "sp": sequence_parallel}):
        hidden = [flops > 0 for axis, _, _, _, flops, in_backward in calls if axis == "tensor" and in_backward]
        head, embedding = 1, sequence_parallel
        assert len(hidden) == MODEL["num_hidden_layers"] * (6 if sequence_parallel else 2) + head + embedding
        # The embedding's gradient has no GEMM, so that the gather before it has nothing to hide behind.
        assert hidden.count(False) == sequence_parallel


def saved_bytes(rank, size, recompute, documents=None):
    """Of one decoder layer between forward and backward, without its parameters and the RoPE tables."""
    sizes = {**MODEL, "hidden_size": 512, "intermediate_size": 1408}
    config = small_config(**sizes)
    group = dist.group.WORLD if size > 1 else None
    tp = TensorParallel.over(group, sequence_parallel=size > 1)
    block = TransformerBlock(config, 0, tp=tp, dtype=torch.bfloat16, device="cpu", recompute=recompute)
    init_parameters(block, 0, 0.02)
    rope = rope_tables(config, SEQ, "cpu")
    outside = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), *rope)}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            saved[storage._cdata] = storage
        return tensor

    hidden = torch.randn(SEQ // size, 1, 512).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(hidden, rope, documents)
        kept = sum(storage.nbytes() for storage in saved.values())
    output.sum().backward()
    return kept / (SEQ * 512)


def saved_on_ranks(recompute):
    return saved_bytes(dist.get_rank(), dist.get_world_size(), recompute)


# 12 + 4 kv/a + 6 f/h and, selective, 8 + 4 kv/a + 4 f/h, and the statistics of norms and attention.
@pytest.mark.parametrize(("recompute", "bound"), [("none", 30.5), ("selective", 21.0)])
@pytest.mark.parametrize("size", [1, 2])
def test_saved_activations(pool, recompute, bound, size):
    for kept in pool.run(saved_on_ranks, size, recompute):
        assert kept <= 1.02 * bound / size


def test_saved_activations_of_packed_documents():
    """Without the kernel for several lengths the output of attention is held twice, in two bytes; no mask is."""
    documents = Documents.of(torch.arange(8).repeat_interleave(SEQ // 8).unsqueeze(0))
    assert saved_bytes(0, 1, "none", documents) <= saved_bytes(0, 1, "none") + BF16


def stage_flops(split):
    model = {**MODEL, "num_hidden_layers": sum(split)}
    return traced_step(model, 2, {"pp": 2, "layers_per_stage": split})[1]


def test_stages_are_balanced(pool):
    config = small_config(**{**MODEL, "num_hidden_layers": 16})
    flops = pool.run(stage_flops, 2, balanced_split(config, 2, SEQ))
    assert max(flops) <= 1.05 * sum(flops) / 2


def microbatch_counts():
    """Operators and FLOPs that one more microbatch costs."""
    one, two = (traced_step(MODEL, count, {})[:2] for count in (1, 2))
    return two[0] - one[0], two[1] - one[1]


def test_operators_and_flops_of_a_microbatch(pool):
    [(operators, flops)] = pool.run(microbatch_counts, 1)
    config = small_config(**MODEL)
    # The tracer counts the whole square of attention, as the formula does; its kernel repeats QK^T in backward.
    attention = 12 * config.num_hidden_layers * config.hidden_size * SEQ
    assert flops <= 1.03 * SEQ * (6 * matmul_parameters(config) + attention)

    model = reference_model(config, 0).bfloat16()
    [(ids, labels)] = make_batches(1, 1, SEQ, config.vocab_size, masked=False)

    with Tracer() as tracer:
        model(input_ids=ids, labels=labels, shift_labels=labels, use_cache=False).loss.backward()
    assert operators <= 0.7 * tracer.operators
