"""Several stages on a rank: the schedule, and training with it against transformers on one process."""

import functools
import time
from collections import Counter

import pytest
import torch
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule
from support.llama import (
    make_batches,
    make_engine,
    my_batches,
    reference_model,
    small_config,
    train_engine,
    train_reference,
)

from hybrid.metrics.timeline import Event, TimelineRecorder, bubble_ratio
from hybrid.model.init import initial_tensor
from hybrid.pipeline.schedule import PassSchedule
from hybrid.planner.simulate import simulate
from hybrid.tensor_parallel.params import named_segments

VOCAB, SAMPLES, SEQ, STEPS, SEED = 131, 8, 8, 3, 5
SGD = {"optimizer": "SGD", "options": {"lr": 0.1}}


INTERLEAVED_BUBBLES = [(2, 2), (2, 4), (4, 4), (4, 8)]
"""Pipeline ranks and microbatches."""


def steps_of(ranks, micro_batches, chunks, **kwargs):
    """The instructions of each rank."""
    schedules = [PassSchedule(micro_batches, ranks, rank, chunks=chunks, **kwargs) for rank in range(ranks)]
    return [[instruction for step in schedule for instruction in step] for schedule in schedules]


def played(streams, forward, backward):
    """The timeline of a step in which a rank's whole part of a microbatch takes `forward` and `backward` seconds."""
    names = [[type(instruction).__name__ for instruction in stream] for stream in streams]
    slots = simulate(names, [{"ForwardPass": forward, "BackwardPass": backward}] * len(names))
    return [[Event(name=s.name, start=s.start, end=s.end, micro_batch=s.micro_batch) for s in rank] for rank in slots]


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("ranks", "micro_batches"), INTERLEAVED_BUBBLES)
def test_the_bubble_is_a_fraction_of_that_of_1f1b(ranks, micro_batches, chunks):
    plain = [TrainSchedule(micro_batches=micro_batches, stages=ranks, stage_id=rank) for rank in range(ranks)]
    before = bubble_ratio(played([[i for step in schedule for i in step] for schedule in plain], 6.0, 12.0))
    after = bubble_ratio(played(steps_of(ranks, micro_batches, chunks), 6.0 / chunks, 12.0 / chunks))
    assert before >= (ranks - 1) / micro_batches - 1e-9
    assert after == pytest.approx((ranks - 1) / (chunks * micro_batches))
    assert after < before


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("ranks", "micro_batches"), INTERLEAVED_BUBBLES)
def test_every_pass_once_in_a_slot_of_its_own(ranks, micro_batches, chunks):
    for rank, stream in enumerate(steps_of(ranks, micro_batches, chunks)):
        slots = list(range(chunks * micro_batches))
        for name in ("ForwardPass", "BackwardPass"):
            passes = [(i.chunk, i.buffer_id) for i in stream if type(i).__name__ == name]
            assert sorted(passes) == [(slot // micro_batches, slot) for slot in slots]
        loads = [i.buffer_id for i in stream if type(i).__name__ == "LoadMicroBatch"]
        ends = [slots[:micro_batches]] * (rank == 0) + [slots[-micro_batches:]] * (rank == ranks - 1)
        assert loads == [slot for end in ends for slot in end], "in the order of the data"
        assert [type(i).__name__ for i in stream[-3:]] == ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]


def test_forward_only_takes_any_number_of_microbatches():
    for micro_batches in range(1, 10):
        timeline = played(steps_of(4, micro_batches, 2, forward_only=True), 1.0, 0.0)
        assert [len([e for e in rank if e.name == "ForwardPass"]) for rank in timeline] == [2 * micro_batches] * 4
    with pytest.raises(ValueError, match="groups of 4.* 6 is no multiple"):
        PassSchedule(6, 4, 0, chunks=2)


@functools.cache
def reference(tie):
    """Samples of each step, the losses of SGD with clipping, and the weights after it."""
    model = reference_model(small_config(num_hidden_layers=9, tie_word_embeddings=tie), SEED)
    steps = [make_batches(SAMPLES, 1, SEQ, VOCAB, seed=step) for step in range(STEPS)]
    return steps, *train_reference(model, steps, torch.optim.SGD, {"lr": 0.1})


def train(cases, references):
    """Per case: whether the initial weights are those of the seed, the losses, and the weights' largest error."""
    results = []
    for tie, micro_batches, layout in cases:
        dp = torch.distributed.get_world_size() // (layout.get("tp", 1) * layout["pp"])
        config = small_config(num_hidden_layers=9, tie_word_embeddings=tie)
        batch = SAMPLES // (micro_batches * dp)
        engine, grid = make_engine(
            config, micro_batches=micro_batches, batch=batch, seq=SEQ, seed=SEED, **SGD, **{"chunks": 2, **layout}
        )
        same = all(
            torch.equal(
                param.detach()[segment.local],
                initial_tensor(SEED, segment.hf_name, segment.hf_shape, config.initializer_range)[segment.source],
            )
            for param, segment in named_segments(engine.module)
            if param.dim() == 2
        )
        steps, _, weights = references[tie]
        results.append((same, *train_engine(engine, grid, steps, micro_batches, weights)))
    return results


def check(pool, world, cases):
    references = {tie: reference(tie) for tie in (False, True)}
    for results in pool.run(train, world, cases, references):
        for (tie, *case), (same, losses, worst) in zip(cases, results, strict=True):
            assert same, case
            assert losses == pytest.approx(references[tie][1], rel=1e-5), case
            assert worst <= 1e-5, case


def test_two_ranks(pool):
    layouts = [{"stage": 0}, {"stage": 1, "chunks": 3}, {"stage": 2, "layers_per_stage": (1, 4, 2, 2)}]
    check(pool, 2, [(tie, m, {"pp": 2, **layout}) for layout in layouts for tie, m in ((False, 2), (True, 4))])


def test_four_ranks(pool):
    check(pool, 4, [(tie, m, {"pp": 4, "recompute": "full"}) for tie, m in ((False, 4), (True, 8))])


def test_tensor_sequence_and_data_parallel(pool):
    layouts = [
        *({"pp": 2, "stage": stage, "bucket_size": size} for stage in (0, 1, 2) for size in (1, 5000)),
        {"pp": 2, "tp": 2},
        {"pp": 2, "tp": 2, "sp": True, "recompute": "selective", "stage": 2},
    ]
    check(pool, 4, [(index % 2 == 0, 2 + 2 * ("tp" in layout), layout) for index, layout in enumerate(layouts)])


def evaluate(layout, batches, counts):
    """A recorded step of training, evaluations of so many microbatches, the same again, and what is left in buffers."""
    engine, _ = make_engine(small_config(), micro_batches=4, batch=1, seq=SEQ, seed=SEED, **SGD, **layout)
    with TimelineRecorder(engine) as recorder:
        engine.train_batch(iter(batches))
    evaluations = [engine.evaluate(iter(batches), count) for count in counts]
    again = engine.evaluate(iter(batches), 4)
    engine.train_batch(iter(batches))
    left = sum(slot is not None for slots in engine.pipe_buffers.values() for slot in slots)
    return evaluations, again, engine.evaluate(iter(batches), 4), left, Counter(e.name for e in recorder.events)


def test_evaluation_between_steps(pool):
    batches, counts = make_batches(4, 1, SEQ, VOCAB), (1, 2, 3, 4)
    ((want, again, trained, _, _),) = pool.run(evaluate, 1, {}, batches, counts)
    for world, layout in (
        (2, {"pp": 2, "chunks": 2}),
        (4, {"pp": 2, "tp": 2, "sp": True, "chunks": 2, "stage": 2}),
    ):
        for got in pool.run(evaluate, world, layout, batches, counts):
            for (loss, tokens), (expected, count) in zip(
                [*got[0], got[1], got[2]], [*want, again, trained], strict=True
            ):
                assert loss == pytest.approx(expected, rel=1e-5) and tokens == count
            assert got[1] == got[0][-1] and got[3] == 0, "bitwise the same, and nothing kept"
            assert got[4]["ForwardPass"] == got[4]["BackwardPass"] == 8


FORWARD, BACKWARD = 0.03, 0.06
"""Seconds, slept, of a rank's whole part of a microbatch: far more than the small model takes."""


def recorded(layout, micro_batches):
    """The timeline of a step in which every pass takes so long, from the running engine."""
    engine, _ = make_engine(small_config(num_hidden_layers=8), micro_batches=micro_batches, batch=1, seq=SEQ, **layout)
    chunks, kind = len(engine.module.chunks), type(engine)

    def slept(instruction, seconds):
        def run(self, *args, **kwargs):
            time.sleep(seconds / chunks)
            kind._INSTRUCTION_MAP[instruction](self, *args, **kwargs)

        return run

    slow = {ForwardPass: slept(ForwardPass, FORWARD), BackwardPass: slept(BackwardPass, BACKWARD)}
    engine.__class__ = type("Slow", (kind,), {"_INSTRUCTION_MAP": {**kind._INSTRUCTION_MAP, **slow}})
    batches = make_batches(2 * micro_batches, 1, SEQ, VOCAB)
    engine.train_batch(iter(batches))
    torch.distributed.barrier()
    with TimelineRecorder(engine) as recorder:
        engine.train_batch(iter(batches))
    return recorder.events


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_recorded_bubble_is_below_that_of_1f1b(pool, ranks):
    before, after = (bubble_ratio(pool.run(recorded, ranks, {"pp": ranks, "chunks": n}, ranks)) for n in (1, 2))
    # (p - 1) / m and half of it; half of the gain is left to noise.
    assert after < 0.75 * before, (before, after)


def buckets_alive(layout):
    """Bucket buffers in use at most, and data-parallel reductions by backward pass, in a step."""
    engine, grid = make_engine(small_config(), micro_batches=2, batch=1, seq=SEQ, bucket_size=3000, **SGD, **layout)
    gradients = engine.optimizer.gradients
    counts, reduce, begin = [], gradients._reduce, gradients.begin_microbatch

    def counted(bucket, flat):
        counts[-1] += 1
        reduce(bucket, flat)

    def begun(last, buckets=None):
        counts.append(0)
        begin(last, buckets)

    gradients._reduce, gradients.begin_microbatch = counted, begun
    engine.train_batch(iter(my_batches(make_batches(4, 1, SEQ, VOCAB), grid, 2)))
    return (
        counts,
        len(engine.optimizer.layout.buckets),
        gradients.buffer_nbytes,
        max(bucket.numel for bucket in engine.optimizer.layout.buckets),
    )


def test_a_bucket_is_reduced_from_the_last_backward_through_it(pool):
    for counts, buckets, _, _ in pool.run(buckets_alive, 4, {"pp": 2, "chunks": 2, "stage": 1}):
        assert counts[0] == counts[2] == 0 and min(counts[1], counts[3]) > 0 and sum(counts) == buckets
    for counts, buckets, nbytes, largest in pool.run(buckets_alive, 4, {"pp": 2, "chunks": 2, "stage": 2}):
        assert counts[:2] == [counts[0]] * 2 and counts[2:] == [counts[2]] * 2 and sum(counts) == 2 * buckets
        assert nbytes == 2 * 4 * largest
