"""Memory, traffic and arithmetic by the planner's formulas against what engines hold, move and compute."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from planner.measured import Case, case, case_name, held_by_one_forward, measure, workload

from hybrid.config.model import LlamaConfig, load_model_config, num_parameters
from hybrid.config.parallel import ParallelConfig, split_layers
from hybrid.metrics.flops import flops_per_token
from hybrid.planner import formulas
from hybrid.planner.layer import inputs_wanted, products
from hybrid.planner.memory import microbatch_activations, optimizer_memory, rank_memory
from hybrid.planner.parameters import bucket_layout, num_stage_parameters
from hybrid.planner.traffic import step_transfers, summarize
from hybrid.planner.workload import Workload

LAYOUTS: list[Case] = [
    case(),
    case(batch=3),
    case(2),
    case(2, sp=True),
    case(1, 2),
    case(2, 2, sp=True, batch=2),
    case(4, sp=True, model={"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    case(1, 4, dtype="fp32"),
    case(batch=2, lora={"r": 4}),
    case(2, sp=True, batch=2, lora={"r": 8, "dropout": 0.1}),
    case(2, 2, sp=True, lora={"r": 8}),
    case(2, lora={"targets": ["q_proj", "v_proj", "down_proj"]}, dtype="fp32"),
    case(1, 2, lora={"targets": ["o_proj", "up_proj"], "dropout": 0.1}),
    case(2, sp=True, lora={"targets": ["down_proj"]}, model={"tie_word_embeddings": True}),
]

STEPS: list[Case] = [
    case(1, 1, 2, stage=0),
    case(2, 1, 2, sp=True, recompute="full", stage=2, gradient_sharding="microbatch", micro_batches=3),
    case(1, 2, 2, recompute="selective", wire="bf16", stage=2, gradient_sharding="microbatch"),
    case(1, 1, 4, stage=2, gradient_sharding="step", wire="bf16"),
    case(2, 2, sp=True, model={"tie_word_embeddings": True}, micro_batches=4),
    case(1, 2, 2, stage=1, model={"tie_word_embeddings": True}, dtype="fp32"),
    case(4, sp=True, recompute="selective", model={"attention_bias": True, "mlp_bias": True}),
    case(4, recompute="full", batch=2),
    case(2, 1, 2, sp=True, stage=0),
    case(1, 4, micro_batches=8),
    case(1, 4, micro_batches=2, recompute="full"),
    case(2, model={"num_key_value_heads": 1, "vocab_size": 130}),
    case(1, 2, 2, chunks=2, micro_batches=4, model={"tie_word_embeddings": True}),
    case(1, 4, chunks=2, micro_batches=8, recompute="selective", model={"num_hidden_layers": 10}),
    case(lora={"r": 4}),
    case(2, sp=True, batch=2, recompute="full", lora={"r": 8, "dropout": 0.1}),
    case(2, 1, 2, stage=2, gradient_sharding="microbatch", lora={"targets": ["q_proj", "v_proj", "down_proj"]}),
    case(2, 2, sp=True, lora={"r": 8}, model={"num_key_value_heads": 1, "tie_word_embeddings": True}),
    case(1, 2, 2, lora={"targets": ["o_proj", "up_proj"]}, dtype="fp32", stage=0),
]


def all_recomputes(c: Case) -> dict[str, dict[str, Any]]:
    """`held_by_one_forward` of each kind of recomputation."""
    return {kind: held_by_one_forward({**c, "recompute": kind}) for kind in ("none", "selective", "full")}


def dropout_on_cpu(w: Workload, stage: int) -> int:
    """Bytes of an adapter's dropout that the planner, which is about GPUs, leaves out.

    A mask is as wide as what it is for, and the state of the random stream, kept to draw it again, has kilobytes.
    """
    if w.lora is None or not w.lora.dropout:
        return 0
    total = 0
    for kind, count in w.layer_kinds(stage).items():
        wanted = zip(products(w), inputs_wanted(w, kind.leading), strict=True)
        masks = sum(product.input_elements(w) for product, flag in wanted if flag and product.adapted)
        total += count * (torch.get_rng_state().nbytes if kind.recompute == "full" else (w.width - 1) * masks)
    return total


def world(c: Case) -> int:
    return int(c["tp"] * c["pp"] * c["dp"])


def _head_input(w: Workload) -> int:
    """Bytes of the hidden states a fused loss saves that keeps the logits; gradients would not be saved tensors."""
    return w.tokens * w.model.hidden_size * w.width * formulas.logits_kept(w)


@pytest.mark.parametrize("c", LAYOUTS, ids=case_name)
def test_activations_are_what_a_forward_leaves_behind(pool: Any, c: Case) -> None:
    for rank in pool.run(all_recomputes, world(c), c):
        for kind, got in rank.items():
            w = workload({**c, "recompute": kind})
            stage = got["place"][0]
            planned = microbatch_activations(w, stage) + dropout_on_cpu(w, stage)
            last = stage == w.p - 1
            # All that is alive: kept activations, and at the end the gradients the fused loss has made.
            assert got["alive"] == pytest.approx(planned + last * formulas.head_kept(w), rel=1e-3)
            if kind == "none":  # the saved tensors alone; recomputation keeps what autograd's hooks do not see
                beside = _head_input(w) if last else -got["output"]
                assert got["saved"] == pytest.approx(planned + beside, rel=1e-3)


def test_a_long_sequence(pool: Any) -> None:
    """16,384 positions: memory is still the formula's, which is linear, and no operator makes the square of them."""
    c = case(2, sp=True, model={"num_hidden_layers": 2}, seq=16384)
    w = workload(c)
    for got in pool.run(held_by_one_forward, 2, c):
        assert got["alive"] == pytest.approx(microbatch_activations(w, 0) + formulas.head_kept(w), rel=1e-3)
        assert got["largest"] < w.seq_length**2 / 16  # as bits, it would be twice that


def arriving_on_gloo(w: Workload, stage: int) -> int:
    """Bytes that the planner, which is about GPUs, leaves out: gloo receives two fp32 buckets beside what it sends."""
    reduced = w.d > 1 and w.zero_stage > 0
    return 2 * 4 * max(bucket.numel for bucket in bucket_layout(w, stage).buckets) if reduced else 0


def attention_passes(w: Workload, stage: int) -> float:
    """Attention's operations on a stage in units of a forward: 3.5 a layer, 1 more where it is repeated."""
    return sum(
        count * (1 + (kind.recompute == "full") + 2.5 * inputs_wanted(w, kind.leading)[1])
        for kind, count in w.layer_kinds(stage).items()
    )


@pytest.mark.parametrize("c", STEPS, ids=case_name)
def test_a_step(pool: Any, c: Case) -> None:
    """Held bytes and traffic exactly, live bytes within 5%, operations within 1%."""
    w = workload(c)
    for got in pool.run(measure, world(c), c):
        stage, tensor_rank, data_rank = got["place"]
        assert optimizer_memory(w, stage, data_rank) == got["memory"]

        want: Counter[tuple[str, str, int, int]] = Counter()
        for x in step_transfers(w, stage, tensor_rank, data_rank):
            want[x.axis, x.op, x.group_size, x.payload] += x.count
        # A send runs in a group of the whole pipeline, whatever its two ends.
        calls = {
            (axis, op, 2 if op == "send" else n, size): count for (axis, op, n, size), count in got["calls"].items()
        }
        assert want == Counter(calls)

        memory = rank_memory(w, stage, data_rank)
        # The tables are older than this step, the output of the stage is alive as well, and not all may be under way.
        stream = w.held_tokens * w.model.hidden_size * w.width
        activations = memory.activations - formulas.rope_tables(w) + dropout_on_cpu(w, stage)
        travelling = memory.wire or arriving_on_gloo(w, stage)
        assert got["after_forward"] == pytest.approx(activations, rel=0.05, abs=3 * stream + travelling)
        # Beside what is held; the moment of the peak is known less well than what is kept.
        beside = memory.total - memory.held
        assert got["peak"] == pytest.approx(beside, rel=0.3, abs=0.3 * beside + travelling - memory.wire)

        # torch counts the whole square of a causal mask: 3.5 times the half that the formula has.
        counted = formulas.stage_flops(w, stage) + attention_passes(w, stage) * formulas.attention_flops(w)
        assert got["flops"] == pytest.approx(w.micro_batches * counted, rel=0.01)


def plan_of(model: LlamaConfig, tp: int = 1, pp: int = 1, dp: int = 1, **changes: Any) -> Workload:
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, data_parallel_size=dp, sequence_parallel=tp > 1
    )
    settings: dict[str, Any] = {"seq_length": 4096, "micro_batch_size": 1, "micro_batches": 1, **changes}
    return Workload(
        model=model, parallel=parallel, layers_per_stage=split_layers(model.num_hidden_layers, pp), **settings
    )


@pytest.mark.parametrize("name", ["llama2-7b", "llama2-70b", "llama3-8b"])
def test_one_rank_does_the_models_flops(name: str) -> None:
    """Of one rank, without recomputation, the operations are the trainer's model FLOPs.

    Only the vocabulary's padding, and blockwise attention's second look at the scores (half a forward), come on top.
    """
    model = load_model_config(name)
    w = plan_of(model)
    again = (formulas.ATTENTION_BACKWARD - 2) * model.num_hidden_layers * formulas.attention_flops(w)
    padding = 6 * w.tokens * model.hidden_size * (w.local_vocab - model.vocab_size)
    assert formulas.stage_flops(w, 0) - again - padding == pytest.approx(flops_per_token(model, 4096) * w.tokens)


@pytest.mark.parametrize("name", ["llama2-7b", "llama2-70b", "llama3-8b", "llama3.2-1b"])
def test_parameters_of_the_known_models(name: str) -> None:
    model = load_model_config(name)
    w = plan_of(model)
    assert (
        num_stage_parameters(w, 0)
        == num_parameters(model)
        + (w.local_vocab - model.vocab_size) * (1 if model.tie_word_embeddings else 2) * model.hidden_size
    )


def test_seven_billion_over_eight_ranks_as_traced() -> None:
    """Llama-2-7B at TP 8, s 4096, one microbatch: 2 (2 L + 1) s h 2 bytes of all-reduces, 1.687 GB of parameters."""
    model = load_model_config("llama2-7b")
    w = plan_of(model, tp=8)
    w = Workload(**{**vars(w), "parallel": ParallelConfig(tensor_model_parallel_size=8)})
    moved = summarize(step_transfers(w, 0))["tensor"]["all_reduce"]["payload_bytes"]
    hidden = 4096 * 4096 * 2
    assert moved == pytest.approx(2 * (2 * 32 + 1) * hidden, rel=1e-3)
    assert 2 * num_stage_parameters(w, 0) == pytest.approx(1.687e9, rel=0.01)
    # The trace counted the whole square of the causal mask.
    square = 3.5 * 32 * formulas.attention_flops(w)
    assert formulas.stage_flops(w, 0) + square == pytest.approx(2.415e13, rel=0.01)
