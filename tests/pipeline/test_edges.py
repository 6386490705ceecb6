"""Layouts and inputs at the edge of what is allowed, against transformers on one process."""

import pytest
import torch
from support.llama import (
    make_batches,
    make_engine,
    my_batches,
    reference_model,
    small_config,
    train_engine,
    train_reference,
)

SIX_HEADS = {"hidden_size": 36, "num_attention_heads": 6, "intermediate_size": 66, "num_key_value_heads": 3}
BIASES = {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}
STEPS = 3
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}, {}),
    "Adam": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6}, {"adam_w_mode": False}),
}


def samples_of(seq, count, vocab, step, masks):
    """Single samples of a step; `masks` names what has no label at all."""
    batches = make_batches(count, 1, seq, vocab, seed=step, masked=seq > 4)
    for index, (_, labels) in enumerate(batches):
        if masks == "half" and index < count // 2 or masks == "step" and step == 1:
            labels.fill_(-100)
    return batches


def reference(changes, seq, count, masks, optimizer):
    config = small_config(**changes)
    steps = [samples_of(seq, count, config.vocab_size, step, masks) for step in range(STEPS)]
    return steps, *train_reference(reference_model(config, 5), steps, *OPTIMIZERS[optimizer][:2])


def run(changes, steps, weights, seq, count, micro_batches, optimizer, **kwargs):
    _, options, more = OPTIMIZERS[optimizer]
    dp = torch.distributed.get_world_size() // (kwargs.get("tp", 1) * kwargs.get("pp", 1))
    engine, grid = make_engine(
        small_config(**changes),
        micro_batches=micro_batches,
        batch=count // (micro_batches * dp),
        seq=seq,
        optimizer=optimizer,
        options={**options, **more},
        **kwargs,
    )
    return train_engine(engine, grid, steps, micro_batches, weights)


def check(pool, world, changes=None, *, seq=8, count=8, micro_batches=2, masks="", optimizer="SGD", **kwargs):
    steps, want, weights = reference(changes or {}, seq, count, masks, optimizer)
    for losses, worst in pool.run(
        run, world, changes or {}, steps, weights, seq, count, micro_batches, optimizer, **kwargs
    ):
        assert losses == pytest.approx(want, rel=1e-5)
        assert worst <= (1e-4 if optimizer == "Adam" else 3e-5)


@pytest.mark.parametrize("changes", [SIX_HEADS, {**SIX_HEADS, **BIASES}, {**SIX_HEADS, "vocab_size": 7}], ids=str)
def test_three_tensor_parallel_ranks(pool, changes):
    check(pool, 3, changes, tp=3, sp=True, seq=9)


@pytest.mark.parametrize("layout", [{"tp": 4, "sp": True}, {"tp": 2, "pp": 2, "stage": 2}], ids=str)
def test_ranks_whose_vocabulary_is_padding_only(pool, layout):
    check(pool, 4, {"vocab_size": 7, "tie_word_embeddings": True}, **layout)


def test_odd_widths_of_heads(pool):
    check(pool, 4, {"head_dim": 14, "num_key_value_heads": 1}, tp=4, sp=True)
    check(pool, 2, {"head_dim": 2, "num_key_value_heads": 4}, tp=2)


def test_biases_with_replicated_heads_under_sequence_parallelism(pool):
    check(pool, 4, BIASES, tp=4, sp=True, micro_batches=4, stage=2)


def test_shortest_sequences(pool):
    check(pool, 2, seq=1, pp=2)
    check(pool, 4, seq=4, tp=4, sp=True)


def test_a_pipeline_with_fewer_microbatches_than_stages(pool):
    for tie in (False, True):
        changes = {"num_hidden_layers": 4, "tie_word_embeddings": tie}
        check(pool, 4, changes, count=2, micro_batches=1, pp=4, stage=2)
    check(pool, 4, {"num_hidden_layers": 10}, micro_batches=4, pp=4, layers_per_stage=(7, 1, 1, 1))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_nothing_supervised_in_a_microbatch_a_rank_or_a_step(pool, stage):
    check(pool, 1, masks="half", stage=stage)
    check(pool, 2, masks="half", stage=stage)
    check(pool, 4, masks="step", stage=stage, pp=2)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_other_optimizers_in_buckets_of_one_parameter(pool, optimizer, stage):
    check(pool, 4, pp=2, stage=stage, optimizer=optimizer, bucket_size=1)


def train_with_dropout(recompute, **kwargs):
    engine, grid = make_engine(
        small_config(attention_dropout=0.3), recompute=recompute, micro_batches=4, optimizer="SGD",
        options={"lr": 0.1}, **kwargs,
    )  # fmt: skip
    for step in range(2):
        batches = make_batches(4 * grid.parallel.data_parallel_size, 2, 8, 131, seed=step)
        engine.train_batch(iter(my_batches(batches, grid, 4)))
    engine.optimizer.wait_parameters()
    held_out = my_batches(make_batches(2 * grid.parallel.data_parallel_size, 2, 8, 131, seed=9), grid, 2)
    evaluations = [engine.evaluate(iter(held_out), 2) for _ in range(2)]
    return engine.optimizer.result, [p.detach().clone() for p in engine.module.parameters()], evaluations


@pytest.mark.parametrize("layout", [{"pp": 2, "stage": 2}, {"tp": 2, "pp": 2, "sp": True}], ids=str)
def test_recomputation_repeats_the_dropout_masks(pool, layout):
    want = pool.run(train_with_dropout, 4, "none", **layout)
    for recompute in ("selective", "full"):
        for (result, weights, _), (other, others, _) in zip(
            want, pool.run(train_with_dropout, 4, recompute, **layout), strict=True
        ):
            assert (result.loss, result.grad_norm) == (other.loss, other.grad_norm)
            assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    for _, _, (first, second) in want:
        assert first == second  # no dropout in evaluation
