"""What a written Hugging Face directory looks like, to transformers too."""

import json

import pytest
import torch
from convert.cases import MODELS, assert_same, make_source, model_config, random_tensors, read_folder, write_hf_folder
from safetensors.torch import load_file, save_file

from hybrid.config.errors import ConfigError
from hybrid.convert.common import DTYPE_NAMES, Job
from hybrid.convert.hf import MAX_SHARD_BYTES, parse_size, plan_shards, write_hf
from hybrid.convert.names import state_key
from hybrid.convert.sharded import plan_layout, write_sharded
from hybrid.convert.sources import open_checkpoint


def convert(source, output, max_bytes=MAX_SHARD_BYTES, **job):
    write_hf(open_checkpoint(source), Job(output=output, **job), max_bytes)
    return output


def shard(source, output, tp, pp, **job):
    checkpoint = open_checkpoint(source)
    write_sharded(checkpoint, plan_layout(checkpoint.config(), tp, pp), Job(output=output, **job))
    return output


def test_five_shards_to_two(tmp_path):
    source = make_source(tmp_path / "hf", "llama2", shards=5)
    wanted = read_folder(source)
    total = sum(tensor.nbytes for tensor in wanted.values())
    output = convert(source, tmp_path / "out", max_bytes=int(0.6 * total))
    index = json.loads((output / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in output.glob("*.safetensors"))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == total
    for file in files:
        held = load_file(output / file)
        assert sum(tensor.nbytes for tensor in held.values()) <= 0.6 * total
        assert held.keys() == {name for name, where in index["weight_map"].items() if where == file}
    assert_same(read_folder(output), wanted)


def test_shards_are_those_of_transformers(tmp_path):
    from huggingface_hub import split_torch_state_dict_into_shards

    tensors = random_tensors(model_config("llama2"), torch.bfloat16)
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    for limit in (1000, 5000, 20000, 10**9):
        theirs = split_torch_state_dict_into_shards(tensors, max_shard_size=limit)
        ours = plan_shards(sizes, limit)
        # Theirs puts a tensor above the limit into a file of its own and goes on filling the one before it.
        if limit > max(sizes.values()):
            assert ours == theirs.filename_to_tensors
        assert all(len(names) == 1 or sum(sizes[n] for n in names) <= limit for names in ours.values())


@pytest.mark.parametrize("text, size", [("5GB", 5 * 10**9), ("1.5 MB", 1500000), ("2GiB", 2**31), ("77", 77)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-1GB", "0"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


BESIDE = {
    "generation_config.json": b'{"eos_token_id": [2, 7], "temperature": 0.6}  ',
    "tokenizer.json": '{"model": {"vocab": {"é": 3}}}\r\n'.encode(),
    "tokenizer.model": bytes(range(256)),
    "tokenizer_config.json": b"{}",
    "special_tokens_map.json": b"{ }",
    "chat_template.jinja": "{{ '\u2028' }}".encode(),
    "additional_chat_templates/tool.jinja": b"{{ tools }}",
}


def test_what_lies_beside_the_weights_is_copied(tmp_path):
    source = make_source(tmp_path / "hf", "llama2")
    (source / "additional_chat_templates").mkdir()
    for name, content in BESIDE.items():
        (source / name).write_bytes(content)
    (source / "training_args.bin").write_bytes(b"not the model's")
    sharded = shard(source, tmp_path / "sharded", 2, 2)
    output = convert(sharded, tmp_path / "out")
    for folder in (sharded, output):
        assert all((folder / name).read_bytes() == content for name, content in BESIDE.items())
        assert not (folder / "training_args.bin").exists()
    assert BESIDE.keys() <= json.loads((sharded / "manifest.json").read_text())["files"].keys()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_dtype_asked_for(tmp_path, dtype):
    source = make_source(tmp_path / "hf", "llama2")
    wanted = {name: tensor.to(DTYPE_NAMES[dtype]) for name, tensor in read_folder(source).items()}
    direct = convert(source, tmp_path / "direct", dtype=DTYPE_NAMES[dtype])
    sharded = shard(source, tmp_path / "sharded", 2, 2, dtype=DTYPE_NAMES[dtype])
    for output in (direct, convert(sharded, tmp_path / "through")):
        assert_same(read_folder(output), wanted)
        config = json.loads((output / "config.json").read_text())
        assert config["dtype"] == config["torch_dtype"] == str(DTYPE_NAMES[dtype]).removeprefix("torch.")


def test_tensors_of_several_dtypes_keep_them(tmp_path):
    config = model_config("llama2")
    tensors = random_tensors(config, torch.bfloat16)
    tensors = {name: tensor.float() if "norm" in name else tensor for name, tensor in tensors.items()}
    source = write_hf_folder(tmp_path / "hf", tensors, config.to_hf("bf16"))
    output = convert(shard(source, tmp_path / "sharded", 2, 2), tmp_path / "out")
    assert_same(read_folder(output), tensors)
    assert json.loads((output / "config.json").read_text())["dtype"] == "bfloat16"


def test_values_beyond_fp16_are_refused(tmp_path):
    config = model_config("llama2")
    tensors = random_tensors(config, torch.bfloat16)
    tensors["model.norm.weight"][3] = 1e6
    source = write_hf_folder(tmp_path / "hf", tensors, config.to_hf("bf16"))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has values beyond 65504"):
        convert(source, tmp_path / "out", dtype=torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_an_fp32_export_takes_the_master_weights(tmp_path):
    config = model_config("llama2")
    masters = random_tensors(config, torch.float32)
    weights = {name: tensor.bfloat16() for name, tensor in masters.items()}
    sharded = shard(write_hf_folder(tmp_path / "hf", weights, config.to_hf("bf16")), tmp_path / "sharded", 1, 1)
    file = sharded / "model-pp00-tp00.safetensors"
    states = {state_key(name, "master"): tensor for name, tensor in masters.items()}
    save_file({**load_file(file), **states}, file)
    manifest = json.loads((sharded / "manifest.json").read_text())
    manifest["files"][file.name]["size"] = file.stat().st_size
    (sharded / "manifest.json").write_text(json.dumps(manifest))
    assert_same(read_folder(convert(sharded, tmp_path / "fp32", dtype=torch.float32)), masters)
    assert_same(read_folder(convert(sharded, tmp_path / "bf16")), weights)
    # Without all of them there is nothing better than the weights.
    del states[state_key("model.norm.weight", "master")]
    save_file({**weights, **states}, file)
    manifest["files"][file.name]["size"] = file.stat().st_size
    (sharded / "manifest.json").write_text(json.dumps(manifest))
    upcast = {name: tensor.float() for name, tensor in weights.items()}
    assert_same(read_folder(convert(sharded, tmp_path / "upcast", dtype=torch.float32)), upcast)


def logits_of(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    ids = torch.randint(0, 131, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids).logits, model.config


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_bits_from_the_export(tmp_path, name):
    source = make_source(tmp_path / "hf", name, shards=2)
    output = convert(shard(source, tmp_path / "sharded", 4, 2), tmp_path / "out", max_bytes=20000)
    (wanted, before), (found, after) = logits_of(source), logits_of(output)
    assert found.dtype == wanted.dtype == MODELS[name][1] and torch.equal(found, wanted)
    assert after.rope_parameters == before.rope_parameters and after.rms_norm_eps == before.rms_norm_eps
    assert after.vocab_size == model_config(name).vocab_size
    assert after.tie_word_embeddings == before.tie_word_embeddings
