"""The rank map against DeepSpeed's topology and the slicing of the layers."""

from __future__ import annotations

import json
import time

import pytest
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from hybrid.config.describe import describe, rank_map
from hybrid.config.load import load_config
from hybrid.config.resolve import resolve_config


def test_the_resolved_configuration_comes_first() -> None:
    run = load_config("z2_tp2", world_size=4)
    text = describe(run)
    resolved, end = json.JSONDecoder().raw_decode(text)
    assert resolved == run.to_dict()
    assert "3,950,848 parameters in bf16" in text[end:]
    assert "4 ranks = pipeline 1 x data 2 x tensor 2 with sequence parallelism" in text[end:]
    assert "16 samples = 4 per microbatch x 2 microbatches x data 2, 2,048 tokens a step" in text[end:]


def test_the_map_of_two_stages() -> None:
    overrides = ["hybrid.model.num_hidden_layers=5", "hybrid.model.vocab_size=2003"]
    lines = rank_map(load_config("z2_tp2_pp2", overrides, world_size=8))
    assert [line.split() for line in lines] == [
        "ranks pipe data tensor decoder layers also q heads kv heads vocabulary rows".split(),
        "0, 2 0 0-1 0 0-2 embedding 0-3 0-1 0-1023".split(),
        "1, 3 0 0-1 1 0-2 embedding 4-7 2-3 1024-2047 (45 padding)".split(),
        "4, 6 1 0-1 0 3-4 norm, head 0-3 0-1 0-1023".split(),
        "5, 7 1 0-1 1 3-4 norm, head 4-7 2-3 1024-2047 (45 padding)".split(),
    ]


def test_replicated_heads_tied_head_and_middle_stages() -> None:
    overrides = [
        "hybrid.model.num_key_value_heads=2",
        "hybrid.model.tie_word_embeddings=true",
        "hybrid.pipeline_model_parallel_size=3",
        "hybrid.pipeline_split=[1,2,1]",
    ]
    lines = rank_map(load_config("z2_tp4_sp", overrides, world_size=12))
    assert lines[1].split() == "0 0 0 0 0 embedding 0-1 0 (on 2 ranks) 0-511".split()
    assert lines[8].split() == "7 1 0 3 1-2 - 6-7 1 (on 2 ranks) -".split()
    assert lines[9].split() == "8 2 0 0 3 norm, head (tied) 0-1 0 (on 2 ranks) 0-511".split()


def test_interleaved_stages() -> None:
    overrides = [
        "hybrid.tensor_model_parallel_size=1",
        "hybrid.pipeline_model_parallel_size=2",
        "hybrid.pipeline_schedule=interleaved",
        "hybrid.pipeline_split=[2,1,1,2]",
        "hybrid.model.num_hidden_layers=6",
    ]
    run = load_config(
        "z2_tp4_sp", [*overrides, 'train_batch_size="auto"', "gradient_accumulation_steps=2"], world_size=2
    )
    first, last = (line.split() for line in rank_map(run)[1:])
    assert first[:8] == "0 0 0 0 0-1, 3 embedding 0-7".split()
    assert last[:8] == "1 1 0 0 2, 4-5 norm, head".split()
    assert "2 interleaved stages a rank" in describe(run)
    again = resolve_config(run.to_dict(), world_size=2)
    assert again.layers_per_stage == run.layers_per_stage == (2, 1, 1, 2) and again.layers_per_rank == (3, 3)


def test_a_rank_of_padding_only() -> None:
    lines = rank_map(load_config("z2_tp4_sp", ["hybrid.model.vocab_size=131"], world_size=4))
    assert [line.split("  ")[-1].strip() for line in lines[1:]] == [
        "0-127",
        "128-255 (125 padding)",
        "256-383 (128 padding)",
        "384-511 (128 padding)",
    ]


@pytest.mark.parametrize("world_size", [4, 8, 16])
def test_coordinates_are_deepspeeds(world_size: int) -> None:
    run = load_config("z2_tp2_pp2", ['train_batch_size="auto"'], world_size=world_size)
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=world_size // 4)
    for line in rank_map(run)[1:]:
        cells = [cell for cell in line.split("  ") if cell]
        ranks, pipe, tensor = cells[0], int(cells[1]), int(cells[3])
        listed = [int(rank) for rank in ranks.split(", ") if rank != "..."]
        expected = topology.filter_match(pipe=pipe, model=tensor)
        assert set(listed) <= set(expected) and (listed[0], listed[-1]) == (expected[0], expected[-1])


def test_a_thousand_ranks_are_described_at_once() -> None:
    start = time.perf_counter()
    text = describe(load_config("llama3_70b_tp8_pp8", world_size=1024))
    assert time.perf_counter() - start < 1.0
    assert len(text.partition("ranks  ")[2].splitlines()) == 1 + 64
    assert "0, 8, ..., 120" in text
