"""Hugging Face to every layout and back, from layout to layout, and with torch.distributed.checkpoint, bit for bit."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from convert.cases import MODELS, assert_same, make_source, model_config, read_folder
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from hybrid.config.parallel import padded_vocab_size
from hybrid.convert.common import Job
from hybrid.convert.hf import write_hf
from hybrid.convert.sharded import plan_layout, write_sharded
from hybrid.convert.sources import open_checkpoint

LAYOUTS = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4)]


def shard(source, output, tp, pp, **job):
    checkpoint = open_checkpoint(source)
    write_sharded(checkpoint, plan_layout(checkpoint.config(), tp, pp), Job(output=output, **job))
    return output


def unshard(source, output, max_bytes=10**9, **job):
    write_hf(open_checkpoint(source), Job(output=output, **job), max_bytes)
    return output


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(tmp_path, name):
    source = make_source(tmp_path / "hf", name, shards=2)
    wanted, config = read_folder(source), json.loads((source / "config.json").read_text())
    before = None
    for tp, pp in LAYOUTS:
        sharded = shard(source, tmp_path / f"tp{tp}pp{pp}", tp, pp, workers=2)
        other = shard(before or source, tmp_path / f"relaid{tp}{pp}", tp, pp)
        assert contents(other) == contents(sharded)
        back = unshard(sharded, tmp_path / f"hf{tp}{pp}")
        assert_same(read_folder(back), wanted)
        assert json.loads((back / "config.json").read_text()) == config
        manifest = json.loads((sharded / "manifest.json").read_text())
        vocab = model_config(name).vocab_size
        assert (manifest["vocab_size"], manifest["padded_vocab_size"]) == (vocab, padded_vocab_size(vocab, tp))
        assert manifest["dtype"] == config["dtype"]
        before = sharded


@pytest.mark.parametrize("name", ["llama3", "biases", "extended", "mqa"])
def test_torch_distributed_checkpoint_reads_it(tmp_path, name):
    source = make_source(tmp_path / "hf", name)
    wanted = read_folder(source)
    sharded = shard(source, tmp_path / "sharded", 4, 2)
    found = {key: torch.zeros_like(tensor) for key, tensor in wanted.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(sharded)), no_dist=True)
    assert_same(found, wanted)


def load_as_dtensors(folder, shapes, dtype):
    """Every tensor cut over two ranks along its first dim, another layout than that of the files."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    mesh = init_device_mesh("cpu", (2,))
    found = {key: zeros(shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)]) for key, shape in shapes.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(folder)))
    return {key: value.full_tensor() for key, value in found.items()}


def test_torch_distributed_checkpoint_reads_another_layout(tmp_path, pool):
    source = make_source(tmp_path / "hf", "llama3")
    wanted = read_folder(source)
    sharded = shard(source, tmp_path / "sharded", 4, 2)
    shapes = {key: tuple(tensor.shape) for key, tensor in wanted.items()}
    for found in pool.run(load_as_dtensors, 2, str(sharded), shapes, torch.bfloat16):
        assert_same(found, wanted)


def test_each_file_holds_its_share_only(tmp_path):
    source = make_source(tmp_path / "hf", "llama3")
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    sharded = shard(source, tmp_path / "sharded", 2, 1)
    sizes = [path.stat().st_size for path in sharded.glob("*.safetensors")]
    assert len(sizes) == 2 and all(part <= 0.55 * size for part in sizes)
