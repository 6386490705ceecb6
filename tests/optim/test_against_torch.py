"""Twenty steps of whole models against one process with torch's optimizers."""

import functools

import pytest
import torch
from support.llama import (
    compare_with,
    make_batches,
    make_engine,
    my_batches,
    reference_loss,
    reference_model,
    small_config,
)

MODEL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "vocab_size": 53}
STEPS, SAMPLES, SEQ = 20, 112, 4  # 112 samples are any of 1, 4, 7 microbatches of 1, 2, 4 ranks
TORCH = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-6}),
}
LAYOUTS = [(1, 2), (2, 2), (4, 1), (1, 4)]
# Microbatches of a rank, and a bucket smaller than one parameter, of a few, and larger than the model.
CASES = [(1, 100), (4, 3000), (7, 10**7)]


@functools.cache
def reference(name):
    """Samples of every step, the losses and the final weights."""
    model = reference_model(small_config(**MODEL), 5)
    kind, options = TORCH[name]
    plain = {"weight_decay": 0.0}
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
    optimizer = kind([{"params": matrices}, {"params": vectors, **plain}], **options)
    steps = [make_batches(SAMPLES, 1, SEQ, MODEL["vocab_size"], seed=step) for step in range(STEPS)]
    losses = []
    for batches in steps:
        optimizer.zero_grad()
        loss = reference_loss(model, batches)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return steps, losses, {key: param.detach().clone() for key, param in model.named_parameters()}


def train(name, steps, weights, stage, micro_batches, tp=1, pp=1, **kwargs):
    config = small_config(**MODEL)
    options = TORCH[name][1]
    dp = torch.distributed.get_world_size() // (tp * pp)
    count = micro_batches * dp
    engine, grid = make_engine(
        config, tp=tp, pp=pp, stage=stage, micro_batches=micro_batches, batch=SAMPLES // count, seq=SEQ,
        optimizer=name, options=options, **kwargs,
    )  # fmt: skip
    losses = []
    for batches in steps:
        ids, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        cut = list(zip(ids.chunk(count), labels.chunk(count), strict=True))
        engine.train_batch(iter(my_batches(cut, grid, micro_batches)))
        losses.append(engine.optimizer.result.loss)
    engine.optimizer.wait_parameters()
    return losses, compare_with(engine.module, weights, lambda p: p.detach())


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"pp{layout[0]}dp{layout[1]}")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_sgd_parameters_and_losses(pool, layout, stage):
    steps, want, weights = reference("SGD")
    pp, dp = layout
    for micro_batches, bucket_size in CASES:
        for losses, worst in pool.run(
            train, pp * dp, "SGD", steps, weights, stage, micro_batches, pp=pp, bucket_size=bucket_size
        ):
            assert losses == pytest.approx(want, rel=1e-6)
            assert worst <= 1e-6


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("kwargs", [{"pp": 2}, {"tp": 2, "sp": True}], ids=str)
def test_adamw_losses(pool, kwargs, stage):
    steps, want, weights = reference("AdamW")
    for losses, _ in pool.run(train, 4, "AdamW", steps, weights, stage, 7, **kwargs):
        assert losses == pytest.approx(want, rel=1e-6)
