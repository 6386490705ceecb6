"""The distributed optimizer against torch's own on one process."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hybrid.config.parallel import ParallelConfig
from hybrid.grid import build_grid
from hybrid.optim.build import optimizer_factory
from hybrid.optim.distributed import DistributedOptimizer
from hybrid.optim.settings import OptimizerSettings
from hybrid.tensor_parallel.params import ParamSpec, replicated, set_spec

SHAPES = [(7, 5), (5,), (33, 7), (3, 33), (3,), (101, 3)]
STEPS = 6


def make_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    params = []
    for index, shape in enumerate(SHAPES):
        param = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        set_spec(param, ParamSpec(segments=(replicated(f"p{index}", shape, 0, 1),), decay=len(shape) > 1))
        params.append(param)
    return params


def gradient(step, microbatch, rank, index):
    """What one microbatch of one rank adds to a parameter's gradient."""
    generator = torch.Generator().manual_seed(hash((step, microbatch, rank, index)) % 2**31)
    return torch.randn(SHAPES[index], generator=generator)


def run_backward(optimizer, params, step, microbatch, last, rank, unused=()):
    optimizer.begin_microbatch(last)
    used = [i for i in range(len(params)) if i not in unused]
    loss = sum((params[i].float() * gradient(step, microbatch, rank, i)).sum() for i in used if params[i].requires_grad)
    (loss * optimizer.backward_scale).backward()
    optimizer.end_microbatch()


def make_optimizer(params, world, stage, name="AdamW", *, bucket_size=64, clip=1.0, options=None, **settings):
    grid = build_grid(ParallelConfig(data_parallel_size=world), num_key_value_heads=1)
    options = options or {"lr": 1e-2, "weight_decay": 0.1}
    return DistributedOptimizer(
        [[(f"p{i}", p)] for i, p in enumerate(params)],
        grid,
        OptimizerSettings(
            stage=stage, bucket_size=bucket_size, nominal_tokens=10 * world, gradient_clipping=clip, **settings
        ),
        optimizer_factory(name, options),
    )


def train(world, stage, micro, *, dtype=torch.float32, unused=(), frozen=(), steps=STEPS, **kwargs):
    """Steps of the distributed optimizer; returns final weights and the norms."""
    params = make_params(dtype)
    for index in frozen:
        params[index].requires_grad_(False)
    optimizer = make_optimizer(params, world, stage, **kwargs)
    norms = []
    for step in range(steps):
        for k in range(micro):
            missing = unused if step == 1 else ()
            run_backward(optimizer, params, step, k, k == micro - 1, dist.get_rank(), missing)
        optimizer.add_loss(torch.tensor(1.0), torch.tensor(10))
        optimizer.finish_gradients()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.result.grad_norm)
    optimizer.wait_parameters()
    return [p.detach().clone() for p in params], norms


def reference(world, micro, name="AdamW", *, clip=1.0, unused=(), frozen=(), options=None, steps=STEPS):
    params = make_params()
    trained = [p for i, p in enumerate(params) if i not in frozen]
    options = options or {"lr": 1e-2, "weight_decay": 0.1}
    decay = options.get("weight_decay", 0.0)
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = getattr(torch.optim, name)(groups, **options)
    norms = []
    for step in range(steps):
        for index, param in enumerate(params):
            if index in frozen:
                continue
            used = not (step == 1 and index in unused)
            total = sum(gradient(step, k, r, index) for k in range(micro) for r in range(world))
            param.grad = total / (10 * world) if used else torch.zeros_like(param)
        norms.append(float(nn.utils.clip_grad_norm_(trained, clip)))
        optimizer.step()
    return [p.detach().clone() for p in params], norms


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("bucket_size", [1, 150, 10**6])
def test_equals_torch_adamw(pool, world, stage, micro, bucket_size):
    expected, expected_norms = reference(world, micro)
    for weights, norms in pool.run(train, world, world, stage, micro, bucket_size=bucket_size):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        assert norms == pytest.approx(expected_norms, rel=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_equals_torch_sgd(pool, stage):
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    expected, _ = reference(2, 4, "SGD", options=options)
    for weights, _ in pool.run(train, 2, 2, stage, 4, name="SGD", options=options):
        torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_unused_and_frozen_parameters(pool, stage):
    """A parameter without gradient in a step counts as zero gradient; a frozen one never moves."""
    expected, _ = reference(2, 2, unused=(2, 5), frozen=(0, 3))
    for weights, _ in pool.run(train, 2, 2, stage, 2, unused=(2, 5), frozen=(0, 3)):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(weights[0], make_params()[0])


@pytest.mark.parametrize("stage", [1, 2])
def test_narrow_wire_adds_in_fp32(pool, stage):
    """A bf16 wire rounds what each rank sends, once; the sums over ranks and microbatches do not."""
    exact, _ = reference(4, 3, "SGD", clip=1e9, options={"lr": 1.0}, steps=1)
    for weights, _ in pool.run(
        train, 4, 4, stage, 3, name="SGD", options={"lr": 1.0}, clip=0.0, steps=1, wire_dtype=torch.bfloat16
    ):
        for index, (got, want) in enumerate(zip(weights, exact, strict=True)):
            terms = sum(gradient(0, k, r, index).abs() for k in range(3) for r in range(4)) / 40
            assert ((got - want).abs() <= terms * 2**-8).all()
            assert not torch.equal(got, want)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_bf16_model_accumulates_and_steps_in_fp32(pool, stage):
    """Updates far below bf16's resolution of the weights add up in the masters."""
    for weights, _ in pool.run(
        train, 2, 2, stage, 1, dtype=torch.bfloat16, name="SGD", options={"lr": 1e-4}, clip=0.0, steps=40
    ):
        start = make_params(torch.bfloat16)
        for index, (got, before) in enumerate(zip(weights, start, strict=True)):
            total = sum(gradient(s, 0, r, index) for s in range(40) for r in range(2)) / 20
            want = (before.float() - 1e-4 * total).bfloat16()
            torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-6)


def overlap_pair(world, stage):
    return [train(world, stage, 2, overlap=overlap)[0] for overlap in (True, False)]


@pytest.mark.parametrize("stage", [1, 2])
def test_overlap_changes_nothing(pool, stage):
    for with_overlap, without in pool.run(overlap_pair, 2, 2, stage):
        assert all(torch.equal(a, b) for a, b in zip(with_overlap, without, strict=True))


def nan_step(world, stage, bad_rank):
    params = make_params(torch.bfloat16)
    optimizer = make_optimizer(params, world, stage)
    before = [p.detach().clone() for p in params]
    optimizer.begin_microbatch(True)
    loss = sum(p.float().sum() for p in params)
    (loss * math.nan if dist.get_rank() == bad_rank else loss).backward()
    optimizer.end_microbatch()
    optimizer.add_loss(torch.tensor(1.0), torch.tensor(10))
    optimizer.finish_gradients()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.wait_parameters()
    skipped = optimizer.result
    run_backward(optimizer, params, 0, 0, True, dist.get_rank())
    optimizer.add_loss(torch.tensor(1.0), torch.tensor(10))
    optimizer.finish_gradients()
    after = [p.detach().clone() for p in params]
    optimizer.step()
    return skipped, all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), optimizer.result


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_nan_on_one_rank_skips_everywhere(pool, stage):
    for skipped, untouched, following in pool.run(nan_step, 4, 4, stage, bad_rank=2):
        assert skipped.skipped and untouched
        assert skipped.reason == "the gradient is not finite on rank(s) [2]"
        assert not following.skipped and math.isfinite(following.grad_norm)


def run_of_skips(world):
    params = make_params()
    optimizer = make_optimizer(params, world, 1, max_skipped_steps=3)
    for _ in range(3):
        optimizer.begin_microbatch(True)
        (sum(p.sum() for p in params) * math.inf).backward()
        optimizer.end_microbatch()
        optimizer.add_loss(torch.tensor(1.0), torch.tensor(10))
        optimizer.finish_gradients()
        optimizer.step()
        optimizer.zero_grad()


def test_many_skips_in_a_row_stop_the_run(pool):
    with pytest.raises(RuntimeError, match="3 steps in a row were skipped"):
        pool.run(run_of_skips, 2, 2)


def three_first_updates():
    param = nn.Parameter(torch.full((5,), 2.0))
    set_spec(param, ParamSpec(segments=(replicated("p", (5,), 0, 1),)))
    optimizer = make_optimizer([param], 1, 1, clip=0.0, options={"lr": 0.1, "weight_decay": 0.0})
    seen = []
    for _ in range(3):
        optimizer.begin_microbatch(True)
        (param.sum() * 3 * optimizer.backward_scale).backward()
        optimizer.end_microbatch()
        optimizer.add_loss(torch.tensor(1.0), torch.tensor(10))
        optimizer.finish_gradients()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(param.detach().clone())
    return seen


def test_adam_counts_its_steps_from_one(pool):
    param = nn.Parameter(torch.full((5,), 2.0))
    adamw = torch.optim.AdamW([param], lr=0.1, weight_decay=0.0)
    expected = []
    for _ in range(3):
        param.grad = torch.full((5,), 0.3)
        adamw.step()
        expected.append(param.detach().clone())
    (seen,) = pool.run(three_first_updates, 1)
    torch.testing.assert_close(seen, expected, rtol=1e-6, atol=0)


def set_weights(world, stage, in_place):
    params = make_params(torch.bfloat16)
    optimizer = make_optimizer(params, world, stage, options={"lr": 0.0, "weight_decay": 0.0})
    for param in params:
        if in_place:
            with torch.no_grad():
                param.fill_(3.0)
        else:
            param.data.fill_(3.0)
    if not in_place:
        optimizer.refresh_masters()
    run_backward(optimizer, params, 0, 0, True, dist.get_rank())
    optimizer.add_loss(torch.tensor(1.0), torch.tensor(10))
    optimizer.finish_gradients()
    optimizer.step()
    optimizer.wait_parameters()
    return all(bool((p == 3.0).all()) for p in params)


@pytest.mark.parametrize("in_place", [True, False])
def test_weights_set_after_the_optimizer_was_built_stay(pool, in_place):
    assert all(pool.run(set_weights, 2, 2, 2, in_place))


def one_small_parameter(world, stage, dtype):
    param = nn.Parameter(torch.full((5,), 2.0, dtype=dtype))
    set_spec(param, ParamSpec(segments=(replicated("p", (5,), 0, 1),)))
    optimizer = make_optimizer([param], world, stage, options={"lr": 0.1, "weight_decay": 0.0})
    for _ in range(2):
        optimizer.begin_microbatch(True)
        param.sum().backward()
        optimizer.end_microbatch()
        optimizer.add_loss(torch.tensor(1.0), torch.tensor(10))
        optimizer.finish_gradients()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait_parameters()
    return param.detach().float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_that_own_nothing_take_part(pool, stage, dtype):
    """All of a parameter smaller than the alignment lies in the first rank's shard."""
    for weight in pool.run(one_small_parameter, 4, 4, stage, dtype):
        torch.testing.assert_close(weight, torch.full((5,), 1.8), rtol=1e-2, atol=0)
