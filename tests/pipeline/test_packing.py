"""Packed documents do not see each other, under every layout."""

import pytest
import torch
from support.llama import make_engine, reference_model, small_config

A, B, VOCAB = 5, 7, 131
SEQ = A + B
LAYOUTS = [(1, {}), (2, {"tp": 2, "sp": True}), (2, {"pp": 2}), (4, {"tp": 2, "pp": 2, "sp": True})]


def documents(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (1, SEQ + 1), generator=generator)


def packed(a_seed, b_seed=1, supervise_a=False):
    """One row of document A and document B; targets only inside B unless A is supervised too."""
    a, b = documents(a_seed)[:, : A + 1], documents(b_seed)[:, : B + 1]
    tokens = torch.cat([a[:, :-1], b[:, :-1]], dim=1)
    labels = torch.cat([a[:, 1:] if supervise_a else torch.full((1, A), -100), b[:, 1:]], dim=1)
    segments = torch.tensor([[0] * A + [1] * B])
    positions = torch.tensor([[*range(A), *range(B)]])
    return tokens, labels, positions, segments


def evaluate(layout, batches):
    engine, _ = make_engine(small_config(), batch=1, seq=SEQ, **layout)
    return [engine.evaluate(iter([batch]), 1) for batch in batches]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=str)
def test_the_neighbour_does_not_matter(pool, world, layout):
    """Changing A leaves B's loss bitwise alone, and it is that of B alone."""
    model = reference_model(small_config(), 5)
    b = documents(1)[:, : B + 1]
    with torch.no_grad():
        logits = model(input_ids=b[:, :-1]).logits
    alone = torch.nn.functional.cross_entropy(logits[0], b[0, 1:]).item()
    for first, second in pool.run(evaluate, world, layout, [packed(2), packed(3)]):
        assert first == second
        assert first[0] == pytest.approx(alone, abs=1e-5) and first[1] == B


def train(layout, batch):
    engine, _ = make_engine(small_config(), batch=1, seq=SEQ, micro_batches=2, gradient_clipping=0.0, **layout)
    engine.train_batch(iter([batch, batch]))
    return engine.optimizer.result


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=str)
def test_gradient_is_that_of_the_documents_apart(pool, world, layout, recompute):
    model = reference_model(small_config(), 5)
    loss = torch.zeros(())
    for seed, length in ((2, A), (1, B)):
        ids = documents(seed)[:, : length + 1]
        logits = model(input_ids=ids[:, :-1]).logits
        loss = loss + torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="sum")
    (loss / SEQ).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    for result in pool.run(train, world, {**layout, "recompute": recompute}, packed(2, supervise_a=True)):
        assert result.loss == pytest.approx(loss.item() / SEQ, abs=1e-5)
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
