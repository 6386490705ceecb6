"""Packed documents do not see each other, under every layout."""

import pytest
import torch
from support.llama import make_engine, reference_model, small_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

A, B, VOCAB = 5, 7, 131
SEQ = A + B
LAYOUTS = [
    (1, {}),
    (2, {"tp": 2, "sp": True}),
    (2, {"pp": 2}),
    (2, {"pp": 2, "chunks": 2, "stage": 2}),
    (4, {"tp": 2, "pp": 2, "sp": True}),
]


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


def evaluate(layout, batches, **changes):
    engine, _ = make_engine(small_config(**changes), batch=1, seq=SEQ, **layout)
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


def test_dynamic_frequencies_are_those_of_each_document(pool):
    """A row longer than the model was made for, a document that is not, and one that is."""
    changes = {"max_position_embeddings": 6, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    total = 0.0
    for seed, length in ((2, A), (1, B)):
        ids = documents(seed)[:, : length + 1]
        model = reference_model(small_config(**changes), 5)  # afresh: it keeps the frequencies of the longest so far
        with torch.no_grad():
            total += torch.nn.functional.cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:], reduction="sum").item()
    for results in pool.run(evaluate, 2, {"tp": 2, "sp": True}, [packed(2, supervise_a=True)], **changes):
        assert results == [(pytest.approx(total / SEQ, rel=1e-6), SEQ)]


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


class Sizes(TorchDispatchMode):
    """Elements of the largest tensor that an operator returns, the backward pass included."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *found])
        return out


LONG, DOCUMENTS = 2048, 8


def largest_tensors(layout):
    """Of a training step and an evaluation on a row of 8 documents, for each way to recompute, with and without
    dropout."""
    ids = torch.randint(0, VOCAB, (1, LONG + 1), generator=torch.Generator().manual_seed(0))
    segments = torch.arange(DOCUMENTS).repeat_interleave(LONG // DOCUMENTS).unsqueeze(0)
    batch = ids[:, :-1], ids[:, 1:], torch.arange(LONG // DOCUMENTS).repeat(DOCUMENTS).unsqueeze(0), segments
    found = {}
    for recompute, dropout in (("none", 0.0), ("selective", 0.0), ("full", 0.0), ("full", 0.1)):
        config = small_config(max_position_embeddings=LONG, num_hidden_layers=2, attention_dropout=dropout)
        engine, _ = make_engine(config, batch=1, seq=LONG, recompute=recompute, **layout)
        with Sizes() as sizes:
            engine.train_batch(iter([batch]))
            engine.evaluate(iter([batch]), 1)
        found[recompute, dropout] = sizes.largest
    return found


def test_no_tensor_has_the_square_of_a_row(pool):
    for found in pool.run(largest_tensors, 2, {"tp": 2, "sp": True}):
        # Hidden states and logits grow with the row; with dropout the scores of one document are made.
        assert all(0 < largest <= LONG * LONG // DOCUMENTS for largest in found.values()), found
