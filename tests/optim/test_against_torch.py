"""Twenty steps of whole models against one process with torch's optimizers."""

import functools

import pytest
import torch
from support.llama import make_batches, make_engine, reference_model, small_config, train_engine, train_reference

MODEL = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 53}
STEPS, SAMPLES, SEQ = 20, 112, 4  # 112 samples are any of 1, 4, 7 microbatches of 1, 2, 4 ranks
TORCH = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-6}),
}
LAYOUTS = [(1, 2), (2, 2), (4, 1), (1, 4)]
# Microbatches of a rank, and a bucket smaller than one parameter, of a few, and larger than the model.
CASES = [(1, 100), (4, 3000), (7, 10**7)]


def model(pp):
    """No more layers than stages need."""
    return small_config(**MODEL, num_hidden_layers=max(pp, 2))


@functools.cache
def reference(name, pp):
    """Samples of every step, the losses and the final weights."""
    steps = [make_batches(SAMPLES, 1, SEQ, MODEL["vocab_size"], seed=step) for step in range(STEPS)]
    return steps, *train_reference(reference_model(model(pp), 5), steps, *TORCH[name])


def train(name, steps, weights, stage, micro_batches, tp=1, pp=1, **kwargs):
    count = micro_batches * torch.distributed.get_world_size() // (tp * pp)
    engine, grid = make_engine(
        model(pp), tp=tp, pp=pp, stage=stage, micro_batches=micro_batches, batch=SAMPLES // count, seq=SEQ,
        optimizer=name, options=TORCH[name][1], **kwargs,
    )  # fmt: skip
    return train_engine(engine, grid, steps, micro_batches, weights)


def check_sgd(pool, layout, stage, case):
    pp, dp = layout
    steps, want, weights = reference("SGD", pp)
    micro_batches, bucket_size = case
    for losses, worst in pool.run(
        train, pp * dp, "SGD", steps, weights, stage, micro_batches, pp=pp, bucket_size=bucket_size
    ):
        assert losses == pytest.approx(want, rel=1e-6)
        assert worst <= 1e-6


def name(layout):
    return f"pp{layout[0]}dp{layout[1]}"


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("which", range(len(LAYOUTS)), ids=lambda which: name(LAYOUTS[which]))
def test_sgd_parameters_and_losses(pool, which, stage):
    """Every layout meets every stage and every case, and so does every stage."""
    check_sgd(pool, LAYOUTS[which], stage, CASES[(which + stage) % len(CASES)])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_sgd_in_all_combinations(pool, layout, stage, case):
    check_sgd(pool, layout, stage, case)


@pytest.mark.parametrize(("kwargs", "stage"), [({"pp": 2}, 1), ({"tp": 2, "sp": True}, 2)], ids=str)
def test_adamw_losses(pool, kwargs, stage):
    steps, want, weights = reference("AdamW", kwargs.get("pp", 1))
    for losses, _ in pool.run(train, 4, "AdamW", steps, weights, stage, 4, **kwargs):
        assert losses == pytest.approx(want, rel=1e-6)
