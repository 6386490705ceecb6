"""Completions and losses at every layout against transformers on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.llama import make_batches, make_engine, reference_loss, reference_model, small_config

from hybrid.generate.decode import generate
from hybrid.generate.sampling import Sampling, choose
from hybrid.generate.stages import evaluate_loss

SEED, NEW = 5, 9
LAYOUTS = [
    (1, {}),
    (2, {"tp": 2, "sp": True}),
    (2, {"pp": 2}),
    (2, {}),
    (4, {"tp": 2, "pp": 2, "sp": True}),
]
PROMPTS = [[3, 17, 99, 4], [5], [8, 9, 10, 11, 12, 13, 130]]


def complete(config: Any, layout: Any, stop: frozenset[int], sampling: Sampling) -> Any:
    engine, grid = make_engine(config, seed=SEED, **layout)
    engine.optimizer.wait_parameters()
    arguments = {"max_new_tokens": NEW, "stop_ids": stop, "sampling": sampling, "seed": 3}
    together = generate(engine.module, grid, PROMPTS, **arguments)
    alone = [generate(engine.module, grid, [prompt], **arguments)[0] for prompt in PROMPTS]
    losses = []
    if sampling.temperature == 0:  # training goes on after it
        engine.train_batch(iter(make_batches(1, 2, 8, config.vocab_size)))
        losses.append(engine.optimizer.result.loss)
    return together, alone, losses


def reference(config: Any) -> list[list[int]]:
    model = reference_model(config, SEED)
    with torch.no_grad():
        return [
            model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0, len(prompt) :].tolist()
            for prompt in PROMPTS
        ]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=str)
def test_greedy_is_transformers(pool: Any, world: int, layout: Any, tied: bool) -> None:
    config = small_config(tie_word_embeddings=tied)
    expected = reference(config)
    stop = expected[0][3]
    cut = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in expected]
    for together, alone, losses in pool.run(complete, world, config, layout, frozenset({stop}), Sampling()):
        assert together == alone == cut
        assert len(losses) == 1


def test_dynamic_frequencies_are_those_of_the_tokens_so_far(pool: Any) -> None:
    config = small_config(max_position_embeddings=8, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    expected = reference(config)
    assert all(len(prompt) < 8 < len(prompt) + NEW for prompt in PROMPTS), "they outgrow the model"
    for _, alone, _ in pool.run(complete, 2, config, {"pp": 2}, frozenset(), Sampling()):
        assert alone == expected


@pytest.mark.parametrize(("world", "layout"), [LAYOUTS[0], LAYOUTS[4]], ids=str)
def test_sampling_depends_on_the_seed_alone(pool: Any, world: int, layout: Any) -> None:
    config = small_config()
    sampling = Sampling(temperature=1.5, top_k=40, top_p=0.9)
    results = pool.run(complete, world, config, layout, frozenset(), sampling)
    together = [result[0] for result in results]
    assert all(result == together[0] for result in together)
    (single,) = pool.run(complete, 1, config, {}, frozenset(), sampling)
    assert together[0] == single[0]
    assert together[0] != reference(config)


def test_top_k_and_top_p() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(2000, 1)
    generator = torch.Generator().manual_seed(0)
    assert set(choose(logits, Sampling(temperature=1.0, top_k=2), generator).tolist()) == {0, 1}
    assert set(choose(logits, Sampling(temperature=1.0, top_p=0.85), generator).tolist()) == {0, 1, 2}
    assert set(choose(logits, Sampling(temperature=1.0, top_p=0.01), generator).tolist()) == {0}
    drawn = choose(logits, Sampling(temperature=1.0), generator)
    assert (drawn == 0).float().mean().item() == pytest.approx(0.5, abs=0.05)
    with pytest.raises(ValueError, match="top_p 0"):
        Sampling(top_p=0)


def losses(config: Any, layout: Any, batches: list[Any]) -> Any:
    engine, grid = make_engine(config, seed=SEED, **layout)
    engine.optimizer.wait_parameters()
    return evaluate_loss(engine.module, grid, batches[grid.data_rank :: grid.parallel.data_parallel_size])


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=str)
def test_loss_is_transformers(pool: Any, world: int, layout: Any) -> None:
    config = small_config()
    batches = make_batches(4, 2, 8, config.vocab_size)
    with torch.no_grad():
        expected = reference_loss(reference_model(config, SEED), batches).item()
    for loss, tokens in pool.run(losses, world, config, layout, batches):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert tokens == sum(int((labels != -100).sum()) for _, labels in batches)
