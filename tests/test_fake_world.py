"""7B, 65B and 70B at cluster layouts, one rank traced on fake tensors: the counts keep the small models' bounds."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from support.fake_world import Step, trace_step

from hybrid.config.layout import balanced_split
from hybrid.config.model import LlamaConfig, load_model_config
from hybrid.config.parallel import ParallelConfig
from hybrid.config.training import LoraConfig
from hybrid.metrics.flops import matmul_parameters
from hybrid.planner import formulas
from hybrid.planner.memory import microbatch_activations, optimizer_memory
from hybrid.planner.parameters import bucket_layout, frozen_elements, num_stage_parameters
from hybrid.planner.traffic import data_transfers, pipeline_transfers, replica_transfers, tensor_transfers
from hybrid.planner.workload import Workload

SEQ = 4096

LLAMA_65B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 8192,
    "intermediate_size": 22016,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "max_position_embeddings": SEQ,
}
"""Touvron et al. 2023 (arXiv:2302.13971), table 2."""


def layout(model: LlamaConfig, tp: int, pp: int, dp: int, *, sp: bool, **options: Any) -> Workload:
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, data_parallel_size=dp, sequence_parallel=sp
    )
    split = balanced_split(model, pp, SEQ)
    return Workload(
        model=model, parallel=parallel, layers_per_stage=split, seq_length=SEQ, micro_batch_size=1, micro_batches=1,
        **options,
    )  # fmt: skip


@functools.cache
def planned(name: str) -> Workload:
    if name == "7b":
        return layout(load_model_config("llama2-7b"), 8, 1, 1, sp=False)
    if name == "7b-sp":
        return layout(load_model_config("llama2-7b"), 8, 2, 8, sp=True)
    if name == "65b":
        return layout(LlamaConfig.from_hf(LLAMA_65B), 8, 8, 4, sp=True, recompute="selective")
    lora = LoraConfig(r=16) if name == "70b-lora" else None
    return layout(load_model_config("llama2-70b"), 8, 4, 16, sp=True, lora=lora)


@functools.cache
def traced(name: str, stage: int) -> Step:
    return trace_step(planned(name), stage)


RANKS = [("7b", 0), ("7b-sp", 0), ("65b", 7), ("70b", 0), ("70b", 3)]
every_rank: Callable[[Any], Any] = pytest.mark.parametrize(("name", "stage"), RANKS)


@every_rank
def test_parameters_and_states(name: str, stage: int) -> None:
    w, step = planned(name), traced(name, stage)
    assert step.numel == num_stage_parameters(w, stage)
    assert step.memory == optimizer_memory(w, stage)
    # Weights in bf16, gradients, masters and moments in fp32, the last three kinds over the data-parallel ranks.
    assert sum(step.memory.values()) <= 1.01 * (6 + 12 / w.d) * step.numel


ADAPTED = [("70b-lora", 0), ("70b-lora", 3)]


@pytest.mark.parametrize(("name", "stage"), ADAPTED)
def test_adapters(name: str, stage: int) -> None:
    """Held and kept bytes and operations are the planner's, and less than a twentieth is trained."""
    w, step = planned(name), traced(name, stage)
    assert step.memory == optimizer_memory(w, stage)
    assert step.numel == num_stage_parameters(w, stage) < 0.05 * frozen_elements(w, stage)
    kept = microbatch_activations(w, stage) + (stage == w.p - 1) * formulas.head_kept(w)
    assert step.kept == pytest.approx(kept, rel=1e-3)
    square = 3.5 * w.layers(stage) * formulas.attention_flops(w)
    assert step.flops == pytest.approx(formulas.stage_flops(w, stage) + square, rel=0.01)


@pytest.mark.parametrize(("name", "stage"), RANKS + ADAPTED)
def test_traffic(name: str, stage: int) -> None:
    w, step = planned(name), traced(name, stage)
    want: Counter[tuple[str, str, int, int]] = Counter()
    for x in [*tensor_transfers(w, stage), *data_transfers(w, stage), *replica_transfers(w, stage, 0, 0)]:
        want[x.axis, x.op, x.group_size, x.payload] += x.count
    assert Counter((c.axis, c.op, c.group_size, c.payload) for c in step.calls) == want
    assert step.output == sum(x.payload for x in pipeline_transfers(w, stage) if stage < w.p - 1)


@every_rank
def test_tensor_parallel_bytes(name: str, stage: int) -> None:
    w, step = planned(name), traced(name, stage)
    # Two sums a layer in each direction, the embedding's and the head's (Shoeybi et al. 2019), each round a ring.
    sums = 4 * w.layers_per_stage[stage] + (stage == 0) + (stage == w.p - 1)
    minimum = sums * 2 * (w.t - 1) / w.t * SEQ * w.model.hidden_size * 2
    moved = sum(call.wire_bytes for call in step.calls if call.axis == "tensor")
    # Sequence parallelism gathers two inputs a layer again for the gradients of the weights.
    assert minimum <= moved <= (1.25 if w.sequence_sharded else 1.02) * minimum


@every_rank
def test_data_parallel_bytes(name: str, stage: int) -> None:
    w, step = planned(name), traced(name, stage)
    moved = sum(call.wire_bytes for call in step.calls if call.axis == "data")
    # fp32 gradients out and bf16 weights in, each but the part that stays.
    minimum = (4 + 2) * step.numel * (w.d - 1) / w.d
    assert minimum <= moved <= 1.01 * minimum
    assert bucket_layout(w, stage).numel <= 1.01 * step.numel


@every_rank
def test_flops(name: str, stage: int) -> None:
    w, step = planned(name), traced(name, stage)
    layers = w.layers_per_stage[stage]
    weights = matmul_parameters(w.model.model_copy(update={"num_hidden_layers": layers}))
    if stage < w.p - 1:
        weights -= w.model.hidden_size * w.model.vocab_size
    share = SEQ * (6 * weights + 12 * layers * w.model.hidden_size * SEQ) / w.t
    # The kernel of attention repeats the scores in backward: 3.5 passes for the formula's 3.
    assert share <= step.flops <= 1.03 * share
    square = 3.5 * layers * formulas.attention_flops(w)
    assert step.flops == pytest.approx(formulas.stage_flops(w, stage) + square, rel=0.01)


def test_stages_are_balanced() -> None:
    w = planned("70b")
    assert len(set(w.layers_per_stage)) == 1
    first, last = (traced("70b", stage).flops for stage in (0, 3))
    # What the middle stages do: an embedding has no GEMM.
    mean = (3 * first + last) / 4
    assert max(first, last) <= 1.05 * mean


@every_rank
def test_activations(name: str, stage: int) -> None:
    w, step = planned(name), traced(name, stage)
    last = stage == w.p - 1
    assert step.kept == pytest.approx(microbatch_activations(w, stage) + last * formulas.head_kept(w), rel=1e-3)
    if not w.sequence_sharded:  # the norms' share is not cut
        return
    beside = microbatch_activations(w, stage) - w.layers_per_stage[stage] * formulas.layer_activations(w, w.recompute)
    layer = (step.kept - last * formulas.head_kept(w) - beside) / w.layers_per_stage[stage]
    m = w.model
    mlp = (4 if w.recompute == "selective" else 6) * m.intermediate_size / m.hidden_size
    bound = 12 + 4 * m.num_key_value_heads / m.num_attention_heads + mlp
    # Above it only the statistics of norms and attention, one number per token, and per token and head.
    assert layer <= 1.005 * bound * SEQ * m.hidden_size / w.t


@every_rank
def test_overlap(name: str, stage: int) -> None:
    w, step = planned(name), traced(name, stage)
    hidden = SEQ * w.model.hidden_size * 2
    exposed = sum(c.hidden_flops == 0 for axis, c in step.backward if axis == "tensor" and c.payload >= hidden)
    # The embedding's gradient has no GEMM, so that the gather before it has nothing to hide behind.
    assert exposed == (w.sequence_sharded and stage == 0)


@every_rank
def test_gradients_leave_behind_the_backward_pass(name: str, stage: int) -> None:
    w, step = planned(name), traced(name, stage)
    gradients = [c for axis, c in step.backward if axis == "data"]
    late = [c.payload for c in gradients if c.issued_at == step.flops]
    # The bucket of the first layer's first projection, and the embedding, whose gradient no GEMM follows.
    embedding = w.local_vocab * w.model.hidden_size * (stage == 0)
    assert sum(late) <= 4 * 1.01 * (w.bucket_size + embedding)
    if step.numel > 20 * (w.bucket_size + embedding):
        assert sum(late) <= 0.05 * sum(c.payload for c in gradients)
