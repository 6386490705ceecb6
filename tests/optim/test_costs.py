"""The optimizer's memory and traffic against its table, and when it communicates."""

import gc
import weakref

import pytest
import torch
from support.llama import make_batches, make_engine, my_batches, small_config
from support.tracer import Tracer

from hybrid.metrics.meter import TrafficMeter
from hybrid.optim.state import memory_bytes

BIG = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1024}
BUCKET = 300_000


def model_numel(engine):
    return sum(param.numel() for param in engine.module.parameters())


def step_with_meter(stage, micro_batches, changes, steps=2, **kwargs):
    config = small_config(**changes)
    engine, grid = make_engine(
        config, stage=stage, micro_batches=micro_batches, dtype=torch.bfloat16, bucket_size=BUCKET, **kwargs
    )
    batches = make_batches(steps * micro_batches * grid.parallel.data_parallel_size, 2, 8, config.vocab_size)
    iterator = iter(my_batches(batches, grid, micro_batches))
    for _ in range(steps - 1):
        engine.train_batch(iterator)
    with TrafficMeter(grid) as meter:
        engine.train_batch(iterator)
        engine.optimizer.wait_parameters()
    return engine, grid, meter.calls


def memory(stage, changes):
    engine, _, _ = step_with_meter(stage, 2, changes)
    optimizer = engine.optimizer
    return model_numel(engine), max(b.numel for b in optimizer.layout.buckets), memory_bytes(optimizer)


def bytes_per_parameter(stage, d):
    return {0: 18, 1: 6 + 12 / d, 2: 2 + 16 / d}[stage]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_bytes_per_parameter(pool, world, stage):
    for numel, largest, held in pool.run(memory, world, stage, BIG):
        buckets = 2 * 4 * largest if stage == 2 and world > 1 else 0
        assert held["buckets"] == buckets
        total = sum(held.values()) - buckets
        assert total == pytest.approx(bytes_per_parameter(stage, world) * numel, rel=0.01)


def peak(stage, micro_batches, changes):
    """Bytes that come alive during the second step, at their most, beside what the optimizer holds."""
    config = small_config(**changes)
    engine, grid = make_engine(
        config, stage=stage, micro_batches=micro_batches, dtype=torch.bfloat16, bucket_size=BUCKET, batch=1, seq=2
    )
    batches = make_batches(2 * micro_batches * grid.parallel.data_parallel_size, 1, 2, config.vocab_size)
    iterator = iter(my_batches(batches, grid, micro_batches))
    engine.train_batch(iterator)
    with Tracer() as tracer:
        engine.train_batch(iterator)
        engine.optimizer.wait_parameters()
    largest = max(param.numel() for param in engine.module.parameters())
    travelling = 2 * 4 * max(bucket.numel for bucket in engine.optimizer.layout.buckets) if stage > 0 else 0
    return tracer.peak_bytes, largest, travelling, sum(memory_bytes(engine.optimizer).values())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_step_needs_little_beside_what_is_held(pool, stage):
    """Microbatches of two tokens: what is left is gradients on their way, one parameter at a time.

    gloo's ranks receive two buckets' pieces beside what they send.
    """
    for transient, largest, travelling, held in pool.run(peak, 2, stage, 4, BIG):
        # The fused loss makes the head's gradient in fp32 and hands it on in bf16.
        assert transient <= 6 * largest + travelling + 0.01 * held


def traffic(stage, micro_batches, changes):
    engine, _, calls = step_with_meter(stage, micro_batches, changes)
    return model_numel(engine), [c for c in calls if c.axis == "data"], [c for c in calls if c.axis == "world"]


@pytest.mark.parametrize("micro_batches", [1, 8])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_bytes_on_the_data_axis(pool, stage, micro_batches):
    for numel, calls, world_calls in pool.run(traffic, 2, stage, micro_batches, BIG):
        payload = {op: sum(c.payload for c in calls if c.op == op) for op in {c.op for c in calls}}
        if stage == 0:
            assert payload == {"all_reduce": pytest.approx(4 * numel, rel=0.01)}
        else:
            times = micro_batches if stage == 2 else 1
            assert payload == {
                "reduce_scatter": pytest.approx(4 * numel * times, rel=0.01),
                "all_gather": pytest.approx(2 * numel, rel=0.01),
            }
        # The norm, the overflow flag, the loss and the flags of the run travel in one small all-reduce.
        assert [(c.op, c.payload) for c in world_calls] == [("all_reduce", 48)]


def events(stage, micro_batches, changes):
    """The order of gradient arrivals, reductions and gathers in one step of one rank."""
    config = small_config(**changes)
    engine, grid = make_engine(config, stage=stage, micro_batches=micro_batches, bucket_size=BUCKET)
    optimizer, log = engine.optimizer, []
    gradients, parameters = optimizer.gradients, optimizer.parameters
    arrived, reduce, gather, wait = gradients._arrived, gradients._reduce, parameters.gather, parameters.wait

    def logged_reduce(bucket, flat):
        log.append(("reduce", bucket.index, bucket.numel))
        reduce(bucket, flat)

    def logged_wait(buckets):
        buckets = list(buckets)
        log.append(("wait", [b for b in buckets if b in parameters._pending]))
        wait(buckets)

    gradients._arrived = lambda index: (log.append(("gradient", index)), arrived(index))
    gradients._reduce = logged_reduce
    parameters.wait = logged_wait
    parameters.gather = lambda: (gather(), log.append(("gathering", list(parameters._pending))))
    batches = make_batches(2 * micro_batches * grid.parallel.data_parallel_size, 2, 8, config.vocab_size)
    iterator = iter(my_batches(batches, grid, micro_batches))
    engine.train_batch(iterator)
    first = list(log)
    log.clear()
    engine.train_batch(iterator)
    return len(optimizer.params), len(optimizer.layout.buckets), first, list(log), optimizer._layer_buckets


@pytest.mark.parametrize("stage", [1, 2])
def test_reductions_run_during_the_last_backward(pool, stage):
    small_buckets = {**BIG, "num_hidden_layers": 12}
    for params, _, first, _, _ in pool.run(events, 2, stage, 2, small_buckets):
        last_backward = [e for e in first if e[0] in ("gradient", "reduce")]
        arrivals = [i for i, e in enumerate(last_backward) if e[0] == "gradient"]
        assert len(arrivals) == 2 * params
        reductions = [(i, e[1], e[2]) for i, e in enumerate(last_backward) if e[0] == "reduce"]
        if stage == 1:
            assert min(i for i, _, _ in reductions) > arrivals[params]  # none before the last microbatch
        in_last = [r for r in reductions if r[0] > arrivals[params]]
        assert [bucket for _, bucket, _ in in_last] == sorted(bucket for _, bucket, _ in in_last)
        early = sum(numel for i, _, numel in in_last if i < arrivals[-1])
        assert early >= 0.9 * sum(numel for _, _, numel in in_last)


@pytest.mark.parametrize("stage", [1, 2])
def test_gathers_are_waited_for_by_the_layers_that_need_them(pool, stage):
    for _, buckets, first, second, layer_buckets in pool.run(events, 2, stage, 2, BIG):
        gathering = next(e[1] for e in first if e[0] == "gathering")
        assert gathering == list(range(buckets))[::-1]  # all in flight, in forward order
        waits = [e[1] for e in second if e[0] == "wait" and e[1]]
        assert len(waits[0]) == 1  # the first layer waits for one bucket
        assert [bucket for group in waits for bucket in group] == gathering
        # Each layer waits only for what it needs.
        by_layer = [e[1] for e in second if e[0] == "wait"][: len(layer_buckets)]
        assert all(set(waited) <= set(needed) for waited, needed in zip(by_layer, layer_buckets, strict=True))


def evaluate_twice(stage):
    """Evaluation right after a step, and again after all gathers were waited for."""
    config = small_config()
    engine, grid = make_engine(config, stage=stage, dtype=torch.bfloat16)
    batches = make_batches(4, 2, 8, config.vocab_size)
    engine.train_batch(iter(my_batches(batches, grid, 1)))
    held_out = my_batches(make_batches(6, 2, 8, config.vocab_size, seed=3), grid, 3)
    at_once = engine.evaluate(iter(held_out), 3)
    engine.optimizer.wait_parameters()
    return at_once, engine.evaluate(iter(held_out), 3)


@pytest.mark.parametrize("stage", [1, 2])
def test_evaluation_sees_the_last_step(pool, stage):
    for at_once, after in pool.run(evaluate_twice, 2, stage):
        assert at_once == after


def still_alive(stage, **layout):
    """What is left of an engine after a step when its user has let go of it."""
    config = small_config()
    engine, grid = make_engine(config, stage=stage, **layout)
    batches = make_batches(grid.parallel.data_parallel_size, 2, 8, config.vocab_size)
    engine.train_batch(iter(my_batches(batches, grid, 1)))
    parts = {"engine": engine, "optimizer": engine.optimizer, "gradients": engine.optimizer.gradients}
    references = {name: weakref.ref(part) for name, part in {**parts, "weights": engine.optimizer.params[0]}.items()}
    del engine, grid, parts
    gc.collect()
    return [name for name, reference in references.items() if reference() is not None]


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "sp": True}, {"pp": 2}], ids=str)
def test_an_engine_leaves_nothing_behind(pool, layout):
    for stage in (1, 2):
        assert pool.run(still_alive, 2, stage, **layout) == [[], []]
