"""Adapters on the tensor-parallel layers against PEFT on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.llama import make_batches, make_engine, my_batches, reference_loss, reference_model, small_config

from hybrid.config.training import LoraConfig
from hybrid.optim.state import memory_bytes
from hybrid.pipeline.lora import add_adapters
from hybrid.pipeline.module import LlamaPipeline
from hybrid.tensor_parallel.lora import LoraSettings, is_adapter_name
from hybrid.tensor_parallel.params import named_segments

R, ALPHA, SEED, STEPS = 3, 6.0, 5, 3
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LAYOUTS = [
    (1, {}),
    (2, {"tp": 2}),
    (2, {"tp": 2, "sp": True}),
    (2, {"pp": 2}),
    (2, {}),
    (4, {"tp": 2, "pp": 2, "sp": True}),
    (4, {"tp": 4, "sp": True}),
]


def values(name: str, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """Adapter matrices that are not zero, by name."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(tuple(shape), generator=generator) * 0.3


def peft_model(config: Any, targets: list[str]) -> Any:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    model = get_peft_model(
        reference_model(config, SEED),
        PeftConfig(r=R, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM"),
    )
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.copy_(values(name.replace(".default", ""), param.shape))
    return model


def lora_engine(config: Any, targets: list[str], micro_batches: int, dropout: float = 0.0, **layout: Any) -> Any:
    """An engine whose module got adapters before the optimizer saw it."""
    original = LlamaPipeline.__init__

    def with_adapters(self: Any, config: Any, grid: Any, **kwargs: Any) -> None:
        original(self, config, grid, **kwargs)
        lora = LoraConfig(r=R, alpha=ALPHA, dropout=dropout, targets=targets)  # type: ignore[arg-type]
        add_adapters(self, lora, grid, SEED)
        with torch.no_grad():
            for param, segment in named_segments(self):
                if is_adapter_name(segment.hf_name):
                    param[segment.local] = values(segment.hf_name, segment.hf_shape)[segment.source]

    LlamaPipeline.__init__ = with_adapters  # type: ignore[method-assign]
    try:
        options = {"micro_batches": micro_batches, "gradient_clipping": 0.0, "optimizer": "SGD", "options": {"lr": 1.0}}
        return make_engine(config, seed=SEED, **{**options, **layout})
    finally:
        LlamaPipeline.__init__ = original  # type: ignore[method-assign]


def one_step(config: Any, targets: list[str], batches: list[Any], micro_batches: int, layout: Any) -> Any:
    """(loss, norm, gradients by name as this rank's slices, whether the frozen weights moved)."""
    engine, grid = lora_engine(config, targets, micro_batches, **layout)
    before = {id(p): p.detach().clone() for p in engine.module.parameters()}
    engine.train_batch(iter(my_batches(batches, grid, micro_batches)))
    engine.optimizer.wait_parameters()
    slices, moved = {}, False
    for param, segment in named_segments(engine.module):
        change = before[id(param)] - param.detach()
        if is_adapter_name(segment.hf_name):
            slices[segment.hf_name] = (segment.source, change[segment.local].clone())
        else:
            moved |= bool((change != 0).any()) or param.grad is not None or param.requires_grad
    result = engine.optimizer.result
    return result.loss, result.grad_norm, slices, moved


@pytest.mark.parametrize(
    ("targets", "world", "layout"),
    [*((ALL, *layout) for layout in LAYOUTS), *((["q_proj", "v_proj", "down_proj"], *LAYOUTS[i]) for i in (0, 2))],
    ids=str,
)
def test_one_step_is_pefts(pool: Any, targets: list[str], world: int, layout: Any) -> None:
    """With SGD at rate 1 the change of a matrix is its gradient; masks are uneven over microbatches and replicas."""
    config = small_config()
    model = peft_model(config, targets)
    batches = make_batches(8, 2, 8, config.vocab_size)
    loss = reference_loss(model, batches)
    loss.backward()
    gradients = {n.replace(".default", ""): p.grad for n, p in model.named_parameters() if p.grad is not None}
    replicas = world // (layout.get("tp", 1) * layout.get("pp", 1))
    seen = set()
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    for got_loss, got_norm, slices, moved in pool.run(one_step, world, config, targets, batches, 8 // replicas, layout):
        assert got_loss == pytest.approx(loss.item(), abs=1e-5)
        assert got_norm == pytest.approx(norm, rel=1e-5)
        assert not moved
        seen |= slices.keys()
        for name, (source, got) in slices.items():
            want = gradients[name][source]
            # The change is read off weights of size 0.3, which rounds it at 3e-8.
            assert (got - want).norm() <= 1e-4 * want.norm() + 1e-7 * want.numel() ** 0.5, name
    assert seen == set(gradients)


def steps(config: Any, batches: list[Any], layout: Any, recompute: str, dropout: float) -> Any:
    engine, grid = lora_engine(
        config, ALL, 2, dropout, recompute=recompute, optimizer="AdamW", options={"lr": 1e-2}, **layout
    )
    mine = iter(my_batches(batches, grid, 2) * STEPS)
    losses = []
    for _ in range(STEPS):
        engine.train_batch(mine)
        losses.append(engine.optimizer.result.loss)
    engine.optimizer.wait_parameters()
    adapters = {
        s.hf_name: p.detach()[s.local].clone() for p, s in named_segments(engine.module) if is_adapter_name(s.hf_name)
    }
    return losses, adapters


@pytest.mark.parametrize(("recompute", "dropout"), [("selective", 0.0), ("selective", 0.3), ("full", 0.3)])
@pytest.mark.parametrize(("world", "layout"), [LAYOUTS[2], LAYOUTS[3]], ids=str)
def test_recomputation_changes_nothing(pool: Any, world: int, layout: Any, recompute: str, dropout: float) -> None:
    config = small_config()
    batches = make_batches(2, 2, 8, config.vocab_size)
    kept = pool.run(steps, world, config, batches, layout, "none", dropout)
    again = pool.run(steps, world, config, batches, layout, recompute, dropout)
    for (losses, adapters), (losses_again, adapters_again) in zip(kept, again, strict=True):
        assert losses == pytest.approx(losses_again, rel=1e-6)
        for name, adapter in adapters.items():
            torch.testing.assert_close(adapter, adapters_again[name], rtol=1e-4, atol=1e-6)


def replicas_after(config: Any, batches: list[Any], layout: Any) -> Any:
    _, adapters = steps(config, batches, layout, "none", 0.3)
    return adapters


@pytest.mark.parametrize("sp", [False, True])
def test_matrices_held_whole_stay_alike_under_dropout(pool: Any, sp: bool) -> None:
    config = small_config()
    first, second = pool.run(replicas_after, 2, config, make_batches(2, 2, 8, config.vocab_size), {"tp": 2, "sp": sp})
    whole = [name for name in first if ("o_proj" in name or "down_proj" in name) == ("lora_B" in name)]
    assert len(whole) == 7 * config.num_hidden_layers
    assert all(torch.equal(first[name], second[name]) for name in whole)


def held(config: Any, layout: Any) -> Any:
    engine, _ = lora_engine(config, ALL, 1, optimizer="AdamW", options={"lr": 1e-2}, bucket_size=10**9, **layout)
    engine.train_batch(iter(make_batches(1, 2, 8, config.vocab_size)))
    numel = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
    return memory_bytes(engine.optimizer), numel, sum(bucket.numel for bucket in engine.optimizer.layout.buckets)


@pytest.mark.parametrize(("world", "layout"), [(1, {}), (2, {}), (2, {"tp": 2, "sp": True})], ids=str)
def test_memory_is_the_adapters(pool: Any, world: int, layout: Any) -> None:
    """Gradients and states in fp32 of the adapters' elements, and of nothing else."""
    config = small_config()
    h, f, kv, layers, tp = (
        config.hidden_size,
        config.intermediate_size,
        16,
        config.num_hidden_layers,
        layout.get("tp", 1),
    )
    # q, k, v, gate and up have A whole and B cut; o and down the other way round.
    column, row = [(h, h), (h, kv), (h, kv), (h, f), (h, f)], [(h, h), (f, h)]
    expected = layers * R * (sum(i + o // tp for i, o in column) + sum(i // tp + o for i, o in row))
    results = pool.run(held, world, config, layout)
    for memory, numel, padded in results:
        assert numel == expected and padded < numel * 1.5
        assert memory["gradients"] == 4 * padded
    # Two moments an element, spread over the replicas.
    assert sum(memory["states"] for memory, _, _ in results) == tp * 8 * expected


def test_settings_scale() -> None:
    assert LoraSettings(r=4, alpha=8, dropout=0, targets=("q_proj",)).scale == 2
