"""The formulas against a trace of real models at cluster layouts, in a world of eight ranks that computes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from model.decoder import Decoder
from planner.test_formulas import plan_of
from support.tracer import Tracer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybrid.config.model import load_model_config
from hybrid.config.parallel import ParallelConfig
from hybrid.planner import formulas
from hybrid.planner.parameters import num_stage_parameters
from hybrid.planner.traffic import tensor_transfers
from hybrid.planner.workload import Workload
from hybrid.tensor_parallel.context import TensorParallel

SEQ = 4096


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "layers", "sequence_parallel"),
    [("llama2-7b", 8, False), ("llama2-7b", 4, True), ("llama2-70b", 10, True)],
)
def test_a_stage_at_tp_8(eight_ranks: None, name: str, layers: int, sequence_parallel: bool) -> None:
    """The layers of one of four stages of 7B, and of one of eight of 70B, with the embedding and the head."""
    model = load_model_config(name).model_copy(update={"num_hidden_layers": layers})
    w = Workload(
        **{**vars(plan_of(model)), "parallel": ParallelConfig(
            tensor_model_parallel_size=8, sequence_parallel=sequence_parallel
        )}
    )  # fmt: skip
    tp = TensorParallel.over(dist.group.WORLD, sequence_parallel=sequence_parallel)
    with FakeTensorMode():
        decoder = Decoder(model, tp, dtype=torch.bfloat16)
        ids = torch.zeros(1, SEQ, dtype=torch.long)
        with Tracer() as tracer:
            loss, _ = decoder(ids, ids)
            loss.backward()
        parameters = sum(param.numel() for param in decoder.parameters())
    assert parameters == num_stage_parameters(w, 0)

    want: Counter[tuple[str, int]] = Counter()
    for x in tensor_transfers(w, 0):
        want[x.op, x.payload] += x.count
    assert Counter((c.op, c.payload) for c in tracer.collectives) == want

    square = 3.5 * layers * formulas.attention_flops(w)
    assert tracer.flops == pytest.approx(formulas.stage_flops(w, 0) + square, rel=0.01)
