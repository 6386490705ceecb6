"""Every layout against transformers on one process: losses, gradients, training, initial weights."""

import functools

import pytest
import torch
from support.llama import (
    make_batches,
    make_engine,
    my_batches,
    recut,
    reference_loss,
    reference_model,
    small_config,
    train_engine,
    train_reference,
)

from hybrid.model.init import initial_tensor
from hybrid.tensor_parallel.params import param_spec

# (tp, pp, dp, sequence parallel)
LAYOUTS = [
    (1, 1, 1, False),
    (2, 1, 1, False),
    (2, 1, 1, True),
    (1, 2, 1, False),
    (1, 1, 2, False),
    (2, 2, 1, False),
    (2, 2, 1, True),
    (2, 1, 2, False),
    (2, 1, 2, True),
    (1, 2, 2, False),
    (4, 1, 1, False),
    (4, 1, 1, True),
    (1, 4, 1, False),
]
SEED, SAMPLES, SEQ = 5, 8, 8
MODEL = {"vocab_size": 131}


def name(layout):
    tp, pp, dp, sp = layout
    return f"tp{tp}pp{pp}dp{dp}{'sp' if sp else ''}"


def arguments(layout):
    tp, pp, _, sp = layout
    return {"tp": tp, "pp": pp, "sp": sp, "seq": SEQ, "seed": SEED}


def world(layout):
    return layout[0] * layout[1] * layout[2]


@functools.cache
def reference_gradients(tie):
    """Samples, their loss and all gradients of it."""
    model = reference_model(small_config(**MODEL, tie_word_embeddings=tie), SEED)
    batches = make_batches(SAMPLES, 1, SEQ, MODEL["vocab_size"])
    loss = reference_loss(model, batches)
    loss.backward()
    gradients = {key: param.grad.clone() for key, param in model.named_parameters()}
    return batches, loss.item(), gradients


def expected_local(param, tensors):
    """What this rank's parameter would hold of the full tensors."""
    local = torch.zeros_like(param)
    for segment in param_spec(param).segments:
        local[segment.local] = tensors[segment.hf_name][segment.source]
    return local


def gradient_errors(layout, tie, cases, batches, gradients):
    """By (stage, microbatches): loss, norm, and the pieces' worst error over what is allowed."""
    return {case: gradient_error(layout, tie, *case, batches, gradients) for case in cases}


def gradient_error(layout, tie, stage, micro_batches, batches, gradients):
    config = small_config(**MODEL, tie_word_embeddings=tie)
    batch = SAMPLES // (micro_batches * layout[2])
    engine, grid = make_engine(
        config, **arguments(layout), stage=stage, micro_batches=micro_batches, batch=batch, gradient_clipping=0.0
    )
    optimizer, worst = engine.optimizer, 0.0
    real_step = optimizer.step

    def step_and_compare():
        nonlocal worst
        tokens = sum(int((labels != -100).sum()) for _, labels in batches)
        factor = optimizer.settings.nominal_tokens / tokens
        for piece in optimizer.pieces:
            want = expected_local(optimizer.params[piece.index], gradients).flatten()[piece.start : piece.stop]
            got = optimizer.gradients.view(piece) * factor
            scale = float(want.abs().max())
            worst = max(worst, float(((got - want).abs() - 1e-4 * want.abs() - 1e-5 * scale).max()))
        real_step()

    optimizer.step = step_and_compare
    engine.train_batch(iter(my_batches(recut(batches, micro_batches * layout[2]), grid, micro_batches)))
    return optimizer.result.loss, optimizer.result.grad_norm, worst


ALL_CASES = [(stage, micro_batches) for stage in (0, 1, 2) for micro_batches in (1, 4)]


def ties(layout):
    """Tied weights matter where stages share them, and where the vocabulary is cut; copies of a model share nothing."""
    tp, pp, dp, _ = layout
    return [False, True] if pp > 1 or (dp == 1 and tp < 4) else [False]


def check_gradients(pool, layout, tie, cases):
    batches, loss, gradients = reference_gradients(tie)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    for found in pool.run(gradient_errors, world(layout), layout, tie, cases, batches, gradients):
        for case, (got_loss, got_norm, worst) in found.items():
            assert got_loss == pytest.approx(loss, abs=1e-5), case
            assert got_norm == pytest.approx(norm, rel=1e-5), case
            assert worst <= 0, case


@pytest.mark.parametrize(
    ("layout", "tie"),
    [(layout, tie) for layout in LAYOUTS for tie in ties(layout)],
    ids=lambda value: value if isinstance(value, bool) else name(value),
)
def test_loss_and_gradients(pool, layout, tie):
    # Stages differ in what copies of a model share: where there is one, each is met once.
    check_gradients(pool, layout, tie, ALL_CASES if layout[2] > 1 else [(0, 1), (1, 4), (2, 4)])


@pytest.mark.slow
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_loss_and_gradients_in_all_combinations(pool, layout, tie):
    check_gradients(pool, layout, tie, ALL_CASES)


STEPS = 20
ADAMW = {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-6}


@functools.cache
def reference_training(tie):
    """Samples of 20 steps, the loss of each, and the final weights, with torch's AdamW."""
    steps = [make_batches(SAMPLES, 1, SEQ, MODEL["vocab_size"], seed=step) for step in range(STEPS)]
    model = reference_model(small_config(**MODEL, tie_word_embeddings=tie), SEED)
    return steps, *train_reference(model, steps, torch.optim.AdamW, ADAMW)


def train(layout, tie, stage, batches, weights):
    config = small_config(**MODEL, tie_word_embeddings=tie)
    # The gradients of several microbatches are compared above; here they matter to a pipeline's schedule.
    micro_batches = 2 if layout[1] > 1 else 1
    engine, grid = make_engine(
        config,
        **arguments(layout),
        stage=stage,
        micro_batches=micro_batches,
        batch=SAMPLES // (micro_batches * layout[2]),
        options=ADAMW,
    )

    def initial(hf_name, shape):
        if len(shape) == 2:
            return initial_tensor(SEED, hf_name, shape, config.initializer_range)
        return torch.full(shape, 1.0 if hf_name.endswith("weight") else 0.0)

    fresh = {
        segment.hf_name: initial(segment.hf_name, segment.hf_shape)
        for param in engine.module.parameters()
        for segment in param_spec(param).segments
    }
    same_start = all(torch.equal(p.detach(), expected_local(p, fresh)) for p in engine.module.parameters())
    return same_start, *train_engine(engine, grid, batches, micro_batches, weights)


def check_training(pool, layout, tie, stage):
    batches, want, weights = reference_training(tie)
    for same_start, losses, worst in pool.run(train, world(layout), layout, tie, stage, batches, weights):
        assert same_start
        assert losses == pytest.approx(want, rel=1e-4)
        assert losses[0] == pytest.approx(want[0], rel=1e-5)
        assert worst <= 1e-4


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_training_of_twenty_steps(pool, layout):
    # Stages share tied weights: every other pipeline ties them. The gradients above are compared both ways.
    pipelines = [other for other in LAYOUTS if other[1] > 1]
    check_training(pool, layout, *((True, 1) if layout in pipelines[::2] else (False, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_training_in_all_combinations(pool, layout, stage, tie):
    check_training(pool, layout, tie, stage)
