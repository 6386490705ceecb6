"""DeepSpeed's layer files: its own loader takes them, and this package reads them back."""

import json

import pytest
import torch
from convert.cases import assert_same, make_source, model_config, read_folder
from convert.live import build

from hybrid.config.errors import ConfigError
from hybrid.convert.common import Job
from hybrid.convert.hf import write_hf
from hybrid.convert.native import write_native
from hybrid.convert.sharded import plan_layout
from hybrid.convert.sources import open_checkpoint
from hybrid.tensor_parallel.params import named_segments

NAMES = ["llama3.2", "biases", "kv_below_tp", "extended"]


def convert(source, output, tp):
    checkpoint = open_checkpoint(source)
    write_native(checkpoint, plan_layout(checkpoint.config(), tp, 1), Job(output=output, workers=2))
    return output


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(tmp_path, name):
    source = make_source(tmp_path / "hf", name)
    for tp in (1, 2, 4):
        native = convert(source, tmp_path / f"native{tp}", tp)
        write_hf(open_checkpoint(native), Job(output=tmp_path / f"out{tp}"))
        assert_same(read_folder(tmp_path / f"out{tp}"), read_folder(source))


def load_by_deepspeed(config, tp, pp, folder, dtype):
    """This rank's slices after PipelineModule has loaded the folder, and whether its padding is zero."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    module, _ = build(config, tp, pp, dtype)
    module.load_state_dir(folder, TorchCheckpointEngine())
    slices = [(s.hf_name, s.source, param.detach()[s.local].clone()) for param, s in named_segments(module)]
    for param, segment in named_segments(module):
        param.data[segment.local] = 0
    return slices, all(not bool(param.any()) for param in module.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_deepspeed_loads_it(tmp_path, pool, name):
    source = make_source(tmp_path / "hf", name)
    config, wanted = model_config(name), read_folder(source)
    native = convert(source, tmp_path / "native", 2)
    dtype = next(iter(wanted.values())).dtype
    for slices, padding_is_zero in pool.run(load_by_deepspeed, 4, config, 2, 2, str(native), dtype):
        assert padding_is_zero
        for hf_name, index, values in slices:
            assert torch.equal(values, wanted[hf_name][index]), hf_name


def test_foreign_layer_files_are_refused(tmp_path):
    native = convert(make_source(tmp_path / "hf", "llama3.2"), tmp_path / "native", 2)
    manifest = native / "manifest.json"
    content = json.loads(manifest.read_text())
    file = native / "layer_01-model_00-model_states.pt"
    state = torch.load(file)
    state["self_attn.query_key_value.weight"] = state.pop("self_attn.qkv_proj.weight")
    torch.save(state, file)
    content["files"][file.name]["size"] = file.stat().st_size
    manifest.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"layer_01-model_00.*\n.*hold exactly.*self_attn\.qkv_proj\.weight"):
        open_checkpoint(native)
    manifest.unlink()
    with pytest.raises(ConfigError, match="of a foreign layout"):
        open_checkpoint(native)
