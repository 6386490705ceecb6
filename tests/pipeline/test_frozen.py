"""Frozen parameters, up to a whole stage, under pipelines and with tied embeddings."""

import pytest
import torch
from support import llama
from support.llama import make_batches, reference_model, small_config, train_engine, train_reference

from hybrid.pipeline.module import LlamaPipeline
from hybrid.tensor_parallel.params import named_segments

VOCAB, SEQ, STEPS = 131, 8, 3
LAST_STAGE = ("layers.3.", "layers.4.", "model.norm", "lm_head")
FIRST_STAGE = ("embed_tokens", "layers.0.", "layers.1.", "layers.2.")


class FrozenPipeline(LlamaPipeline):
    """A stage whose parameters with one of `frozen` in their names stay as they are."""

    frozen: tuple[str, ...] = ()

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for param, segment in named_segments(self):
            if any(part in segment.hf_name for part in self.frozen):
                param.requires_grad_(False)


def reference(changes, frozen):
    model = reference_model(small_config(**changes), 5)
    for name, param in model.named_parameters():
        param.requires_grad_(not any(part in name for part in frozen))
    steps = [make_batches(4, 2, SEQ, VOCAB, seed=step) for step in range(STEPS)]
    return steps, *train_reference(model, steps, torch.optim.SGD, {"lr": 0.1})


def run(changes, frozen, steps, weights, **kwargs):
    FrozenPipeline.frozen = frozen
    llama.LlamaPipeline = FrozenPipeline
    try:
        engine, grid = llama.make_engine(
            small_config(**changes), micro_batches=2, batch=2, seq=SEQ, optimizer="SGD", options={"lr": 0.1}, **kwargs
        )
    finally:
        llama.LlamaPipeline = LlamaPipeline
    return train_engine(engine, grid, steps, 2, weights)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    ("changes", "frozen"),
    [
        ({}, ("embed_tokens",)),
        ({"tie_word_embeddings": True}, ("embed_tokens",)),
        ({}, ("norm",)),
        ({}, FIRST_STAGE),
        ({}, LAST_STAGE),
    ],
    ids=["embedding", "tied", "norms", "first-stage", "last-stage"],
)
def test_frozen_under_a_pipeline(pool, changes, frozen, stage):
    steps, want, weights = reference(changes, frozen)
    for losses, worst in pool.run(run, 4, changes, frozen, steps, weights, pp=2, stage=stage):
        assert losses == pytest.approx(want, rel=1e-5)
        assert worst <= 1e-5


def test_frozen_stages_of_an_interleaved_pipeline(pool):
    """The first stage, and one of two that the last rank holds."""
    for frozen in (("embed_tokens", "layers.0.", "layers.1."), ("layers.2.",)):
        steps, want, weights = reference({}, frozen)
        for losses, worst in pool.run(run, 4, {}, frozen, steps, weights, pp=2, chunks=2, stage=2):
            assert losses == pytest.approx(want, rel=1e-5)
            assert worst <= 1e-5


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_frozen_first_layers_with_recomputation(pool, recompute):
    frozen = ("embed_tokens", "layers.0.")
    steps, want, weights = reference({}, frozen)
    # Two data-parallel ranks have the reference's four microbatches between them.
    for losses, worst in pool.run(run, 4, {}, frozen, steps, weights, tp=2, sp=True, recompute=recompute):
        assert losses == pytest.approx(want, rel=1e-5)
        assert worst <= 1e-5


def refusal(*args, **kwargs):
    try:
        run(*args, **kwargs)
    except ValueError as error:
        return str(error)


def test_a_model_frozen_as_a_whole_is_refused_on_every_rank(pool):
    for message in pool.run(refusal, 2, {}, ("model", "lm_head"), [], {}, pp=2):
        assert message is not None and "no parameter of the model requires a gradient" in message
