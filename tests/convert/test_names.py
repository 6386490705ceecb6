"""The name table against the layers of the running model, and against transformers."""

import pytest
import torch
from convert.cases import MODELS, model_config

from hybrid.config.parallel import split_layers
from hybrid.convert.names import (
    hf_shapes,
    is_state_key,
    owned_segments,
    pipeline_layers,
    rank_segments,
    stage_layers,
    state_key,
)
from hybrid.model.kernels import TORCH
from hybrid.pipeline.module import LlamaPipeline
from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.params import param_spec

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 3), (4, 2), (4, 4), (8, 1), (1, 4)]


def live_layers(config, tp_size, tp_rank, splits):
    """The pipeline's own layer list, built on the meta device: [(parameter name, shape, segments)] per layer."""
    pipeline = LlamaPipeline.__new__(LlamaPipeline)
    torch.nn.Module.__init__(pipeline)
    pipeline.config = config
    pipeline._blocks = [range(sum(splits[:i]), sum(splits[: i + 1])) for i in range(len(splits))]
    group = object() if tp_size > 1 else None
    pipeline.tp = TensorParallel(group=group, rank=tp_rank, size=tp_size)
    layers = [spec.build() for spec in pipeline._specs(torch.float32, torch.device("meta"), "none", None, TORCH)]
    return [
        [(name, tuple(param.shape), param_spec(param).segments) for name, param in layer.named_parameters()]
        for layer in layers
    ]


@pytest.mark.parametrize("name", MODELS)
def test_the_table_is_what_the_layers_hold(name):
    config = model_config(name)
    for tp, pp in LAYOUTS:
        splits = split_layers(config.num_hidden_layers, pp)
        for tp_rank in range(tp):
            live = live_layers(config, tp, tp_rank, splits)
            table = pipeline_layers(config, tp, tp_rank)
            assert [[(p.name, p.shape, p.segments) for p in layer] for layer in table] == live
            for pp_rank in range(pp):
                held = [s for i in stage_layers(splits, pp_rank) for _, _, segments in live[i] for s in segments]
                if config.tie_word_embeddings and pp == 1:
                    held = held[:-1]  # the module shares the parameter
                assert rank_segments(config, tp, splits, pp_rank, tp_rank) == held


@pytest.mark.parametrize("name", MODELS)
def test_every_element_has_one_owner(name):
    config = model_config(name)
    for tp, pp in LAYOUTS:
        counts = {key: torch.zeros(shape, dtype=torch.int) for key, shape in hf_shapes(config).items()}
        for _, _, segments in owned_segments(config, tp, split_layers(config.num_hidden_layers, pp)):
            for segment in segments:
                counts[segment.hf_name][segment.source] += 1
        assert all(bool((count == 1).all()) for count in counts.values())


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_are_those_of_transformers(name):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model_config(name)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config.to_hf("fp32")))
    state = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    assert hf_shapes(config) == state


def test_whole_heads_with_their_group():
    """q rows 0..7, k rows 100..103, v rows 200..203: each of two ranks has whole heads with their key and value."""
    config = model_config("kv_below_tp").model_copy(
        update={"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2}
    )
    rows = {"q_proj": list(range(8)), "k_proj": list(range(100, 104)), "v_proj": list(range(200, 204))}
    for rank, wanted in enumerate(([0, 1, 2, 3, 100, 101, 200, 201], [4, 5, 6, 7, 102, 103, 202, 203])):
        (qkv,) = [p for p in pipeline_layers(config, 2, rank)[1] if p.name == "self_attn.qkv_proj.weight"]
        held = [rows[s.hf_name.split(".")[-2]][row] for s in qkv.segments for row in range(s.shard.start, s.shard.stop)]
        assert held == wanted


def test_state_keys():
    assert state_key("lm_head.weight", "master") == "optimizer.lm_head.weight.master"
    assert is_state_key("optimizer.lm_head.weight.exp_avg") and not is_state_key("lm_head.weight")
