"""What must not change the numbers besides the layout: recompute, splits, microbatches, model variants, dtype."""

import functools
import math
import warnings

import pytest
import torch
from support.llama import (
    make_batches,
    make_engine,
    my_batches,
    recut,
    reference_model,
    small_config,
    train_engine,
    train_reference,
)

VOCAB, SAMPLES, SEQ, STEPS = 131, 8, 8, 3
SGD = {"optimizer": "SGD", "options": {"lr": 0.1}}


def reference(changes):
    """Samples of each step, the losses of SGD with clipping, and the weights after it."""
    steps = [make_batches(SAMPLES, 1, SEQ, VOCAB, seed=step) for step in range(STEPS)]
    return steps, *train_reference(reference_model(small_config(**changes), 5), steps, torch.optim.SGD, {"lr": 0.1})


cached_reference = functools.cache(lambda items: reference(dict(items)))


def run(changes, steps, weights, micro_batches=2, **kwargs):
    engine, grid = make_engine(small_config(**changes), micro_batches=micro_batches, **SGD, **kwargs)
    return train_engine(engine, grid, steps, micro_batches, weights)


def check(pool, world, changes=(), **kwargs):
    changes = dict(changes)
    steps, want, weights = cached_reference(tuple(sorted(changes.items(), key=str)))
    for losses, worst in pool.run(run, world, changes, steps, weights, **kwargs):
        assert losses == pytest.approx(want, rel=1e-5)
        assert worst <= 1e-5


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize(
    "layout", [{"tp": 1}, {"tp": 2, "sp": True}, {"pp": 2}, {"tp": 2, "pp": 2, "sp": True}], ids=str
)
def test_recompute(pool, layout, recompute):
    world = layout.get("tp", 1) * layout.get("pp", 1)
    check(pool, world, recompute=recompute, batch=4, seq=SEQ, **layout)


def test_every_split_of_uneven_layers(pool):
    for layers_per_stage in ((3, 2), (2, 3), (4, 1), (1, 4)):
        check(pool, 2, pp=2, batch=4, seq=SEQ, layers_per_stage=layers_per_stage)


def test_uneven_masks_in_any_microbatches(pool):
    """The same samples as 1 x 8, 2 x 4 and 8 x 1, with uneven masks."""
    for micro_batches in (1, 2, 8):
        check(pool, 1, micro_batches=micro_batches, batch=SAMPLES // micro_batches, seq=SEQ)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        {"head_dim": 16},
        {"attention_bias": True, "mlp_bias": True},
        {"rms_norm_eps": 1e-2},
        {"rope_theta": 500.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", [{"tp": 4, "sp": True}, {"tp": 2, "pp": 2, "stage": 2}], ids=str)
def test_model_variants(pool, changes, layout):
    steps, want, weights = reference(changes)
    for losses, worst in pool.run(run, 4, changes, steps, weights, batch=4, seq=SEQ, **layout):
        assert losses == pytest.approx(want, rel=1e-5)
        assert worst <= 1e-5


def evaluate(changes, micro_batches, **kwargs):
    """Microbatch k holds only token k: what evaluation says after a step of training."""
    engine, grid = make_engine(small_config(**changes), micro_batches=micro_batches, batch=1, **SGD, **kwargs)
    ids = [torch.full((1, SEQ), k) for k in range(micro_batches)]
    constant = [(batch, batch.clone()) for batch in ids]
    engine.train_batch(iter(constant))
    trained = engine.optimizer.result.loss
    singles = [engine.evaluate(iter([batch]), 1)[0] for batch in constant]
    return trained, singles, engine.evaluate(iter(constant), micro_batches)


def test_train_then_evaluate_under_a_pipeline(pool):
    ((trained, singles, whole),) = pool.run(evaluate, 1, {}, 4)
    assert len({round(loss, 4) for loss in singles}) == 4
    for world, layout in ((2, {"pp": 2}), (4, {"pp": 4}), (4, {"tp": 2, "pp": 2, "sp": True})):
        for other in pool.run(evaluate, world, {}, 4, **layout):
            assert other[0] == pytest.approx(trained, rel=1e-5)
            assert other[1] == pytest.approx(singles, rel=1e-5)
            assert other[2][0] == pytest.approx(whole[0], rel=1e-5) and other[2][1] == whole[1] == 4 * SEQ


def first_loss(dtype, **kwargs):
    engine, grid = make_engine(small_config(), dtype=dtype, batch=4, seq=SEQ, micro_batches=2, **kwargs)
    steps, _, _ = reference({})
    dp = grid.parallel.data_parallel_size
    batches = my_batches(recut(steps[0], 2 * dp), grid, 2)
    engine.train_batch(iter(batches))
    dtypes = {param.dtype for param in engine.module.parameters()}
    floating = {b.dtype for b in engine.module.buffers() if b.is_floating_point()}
    return engine.optimizer.result, dtypes, floating


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [{}, {"tp": 2, "sp": True}, {"pp": 2, "stage": 2}], ids=str)
def test_half_precision(pool, dtype, layout):
    fp16 = {"fp16": {"initial_scale_power": 8}} if dtype == torch.float16 else {}
    _, (want, *_), _ = cached_reference(())
    for result, dtypes, floating in pool.run(
        first_loss, layout.get("tp", 1) * layout.get("pp", 1), dtype, **layout, **fp16
    ):
        assert abs(result.loss - want) < 2e-2 and not result.skipped and math.isfinite(result.grad_norm)
        assert dtypes == {dtype} and floating <= {torch.float32}


def overflow_on_one_rank(bad_steps, **kwargs):
    """The loss scale of each step when rank 1's gradients overflow in some of them."""
    engine, grid = make_engine(
        small_config(),
        dtype=torch.float16,
        micro_batches=2,
        fp16={"initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2, "min_loss_scale": 1},
        **kwargs,
    )
    batches = make_batches(2 * grid.parallel.data_parallel_size, 2, SEQ, VOCAB)
    seen = []
    for step in range(6):
        optimizer = engine.optimizer
        before = [p.detach().clone() for p in engine.module.parameters()]
        lr_steps = engine.lr_scheduler.last_epoch
        handles = []
        if step in bad_steps and grid.rank == 1:
            handles = [next(engine.module.parameters()).register_hook(lambda g: g * math.inf)]
        engine.train_batch(iter(my_batches(batches, grid, 2)))
        for handle in handles:
            handle.remove()
        optimizer.wait_parameters()
        moved = not all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
        seen.append((optimizer.loss_scale, optimizer.result.skipped, moved, engine.lr_scheduler.last_epoch - lr_steps))
    return seen


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"stage": 2}], ids=str)
def test_fp16_overflow_on_one_rank(pool, layout):
    for seen in pool.run(overflow_on_one_rank, 2, (1, 2), **layout):
        assert [scale for scale, *_ in seen] == [16, 8, 4, 4, 8, 8]
        assert [skipped for _, skipped, *_ in seen] == [False, True, True, False, False, False]
        assert all(moved != skipped for _, skipped, moved, _ in seen)
        assert all(advanced == (0 if skipped else 1) for _, skipped, _, advanced in seen)


def endless_overflow():
    return overflow_on_one_rank(range(6))


def test_fp16_stops_at_the_minimum_scale(pool):
    with pytest.raises(RuntimeError, match="minimum loss scale 1 "):
        pool.run(endless_overflow, 2)


def warnings_of_a_step(**kwargs):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine, _ = make_engine(small_config(tie_word_embeddings=True), **kwargs)
        engine.train_batch(iter(make_batches(1, 2, SEQ, VOCAB)))
    return [str(warning.message) for warning in caught]


def test_a_tied_pipeline_warns_of_nothing(pool):
    """Broadcasting tied weights under autograd would make torch speak of incorrect gradients."""
    for messages in pool.run(warnings_of_a_step, 2, pp=2):
        assert not [message for message in messages if "autograd" in message]
