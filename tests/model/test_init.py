"""Initial weights: the same full tensors for any layout, and the distribution asked for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from model.decoder import Decoder
from support.pool import WorkerPool
from torch import Tensor

from hybrid.config.model import LlamaConfig
from hybrid.model import init
from hybrid.model.init import init_parameters, initial_tensor
from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.params import named_segments

CONFIG = LlamaConfig.from_hf(
    {
        "vocab_size": 1031,
        "hidden_size": 32,
        "intermediate_size": 1200,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_bias": True,
    }
)


def _initial(dtype: torch.dtype) -> dict[str, tuple[tuple[slice, ...], Tensor]]:
    model = Decoder(CONFIG, TensorParallel.over(dist.group.WORLD), dtype)
    for param in model.parameters():
        torch.nn.init.constant_(param, float("nan"))
    init_parameters(model, 3, 0.02)
    for param in model.parameters():
        assert param.isfinite().all(), "padding included"
    return {seg.hf_name: (seg.source, param.detach()[seg.local].clone()) for param, seg in named_segments(model)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitwise_the_same_for_any_layout(pool: WorkerPool, dtype: torch.dtype) -> None:
    (whole,) = pool.run(_initial, 1, dtype)
    for world in (2, 4):
        covered = {name: torch.zeros_like(value, dtype=torch.bool) for name, (_, value) in whole.items()}
        for pieces in pool.run(_initial, world, dtype):
            for name, (source, value) in pieces.items():
                assert torch.equal(whole[name][1][source], value), name
                covered[name][source] = True
        assert all(mask.all() for mask in covered.values())


def test_norms_are_one_and_biases_zero(pool: WorkerPool) -> None:
    (whole,) = pool.run(_initial, 1, torch.float32)
    vectors = {name: value for name, (_, value) in whole.items() if value.dim() == 1}
    assert len(vectors) == 2 * 6 + 1
    for name, value in vectors.items():
        assert (value == (0.0 if name.endswith(".bias") else 1.0)).all(), name


def test_any_part_is_a_slice_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "BLOCK", 16)
    shape = (50, 37)
    whole = initial_tensor(1, "w", shape, 1.0)
    for rows in (slice(0, 50), slice(0, 16), slice(15, 33), slice(49, 50), slice(20, 20)):
        for columns in (slice(None), slice(16, 32), slice(30, 37)):
            part = initial_tensor(1, "w", shape, 1.0, (rows, columns))
            assert torch.equal(part, whole[rows, columns])


def test_seed_and_name_decide_and_blocks_are_independent() -> None:
    shape = (1024, 1024)
    one = initial_tensor(1, "a", shape, 0.02)
    assert torch.equal(one, initial_tensor(1, "a", shape, 0.02))
    corner = one[:512, :512]
    for other in (
        initial_tensor(2, "a", shape, 0.02)[:512, :512],
        initial_tensor(1, "b", shape, 0.02)[:512, :512],
        one[512:, :512],
        one[:512, 512:],
    ):
        correlation = torch.corrcoef(torch.stack((corner.flatten(), other.flatten())))[0, 1]
        assert abs(correlation) < 5 / 512  # five standard deviations of independent entries
    assert abs(one.mean()) < 5 * 0.02 / 1024
    assert one.std().item() == pytest.approx(0.02, rel=0.01)


def test_global_stream_is_left_alone() -> None:
    before = torch.get_rng_state()
    initial_tensor(1, "a", (8, 8), 1.0)
    assert torch.equal(torch.get_rng_state(), before)
