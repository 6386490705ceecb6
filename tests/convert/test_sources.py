"""Sources as they are in the wild, and what is refused."""

import json

import pytest
import torch
from convert.cases import assert_same, make_source, model_config, random_tensors, read_folder, write_hf_folder
from safetensors.torch import load_file, save_file

from hybrid.config.errors import ConfigError
from hybrid.convert.common import Job, checked_weights
from hybrid.convert.hf import write_hf
from hybrid.convert.names import hf_shapes
from hybrid.convert.sharded import plan_layout, write_sharded
from hybrid.convert.sources import open_checkpoint


def all_tensors(folder):
    store = open_checkpoint(folder).store
    return {name: store.read(name) for name in store.tensors}


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def refusal(folder, tmp_path):
    """Why a folder is not converted; nothing may have been written."""
    output = tmp_path / "out" / "model"
    with pytest.raises(ConfigError) as caught:
        write_hf(open_checkpoint(folder), Job(output=output))
    assert not output.parent.exists()
    return str(caught.value)


@pytest.mark.parametrize("shards", [1, 5])
def test_safetensors(tmp_path, shards):
    folder = make_source(tmp_path / "hf", "llama3", shards)
    assert_same(all_tensors(folder), read_folder(folder))


@pytest.mark.parametrize("legacy", [False, True])
def test_pickled(tmp_path, legacy):
    folder = make_source(tmp_path / "hf", "llama2")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number in range(2):
        file = f"pytorch_model-{number + 1:05d}-of-00002.bin"
        part = {name: tensors[name] for name in names[number::2]}
        torch.save(part, folder / file, _use_new_zipfile_serialization=not legacy)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same(all_tensors(folder), tensors)
    write_hf(open_checkpoint(folder), Job(output=tmp_path / "out"))
    assert_same(read_folder(tmp_path / "out"), tensors)


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize("content", [Evil(), {"x": Evil()}, {"x": 3}], ids=["object", "value", "number"])
def test_nothing_in_a_pickle_is_executed(tmp_path, capsys, content):
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin"):
        open_checkpoint(tmp_path)
    assert "executed" not in capsys.readouterr().out


def test_a_shard_that_is_not_there(tmp_path):
    folder = make_source(tmp_path / "hf", "llama2", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "names model-00002-of-00003.safetensors, which is not there" in refusal(folder, tmp_path)


def test_an_index_that_is_wrong(tmp_path):
    folder = make_source(tmp_path / "hf", "llama2", shards=2)
    index = folder / "model.safetensors.index.json"
    file = "model-00001-of-00002.safetensors"
    edit_json(index, lambda content: content["weight_map"].update({"model.layers.9.mlp.up_proj.weight": file}))
    assert f"model.layers.9.mlp.up_proj.weight is not in {file}" in refusal(folder, tmp_path)
    index.write_text("{}")
    assert "not an index with a weight_map" in refusal(folder, tmp_path)


def test_a_tensor_in_two_shards(tmp_path):
    folder = make_source(tmp_path / "hf", "llama2", shards=2)
    first, second = sorted(folder.glob("*.safetensors"))
    held = load_file(first)
    name = next(iter(held))
    save_file({**load_file(second), name: held[name]}, second)
    assert f"{name} lies in {second.name} and in another file" in refusal(folder, tmp_path)


def test_exact_names_of_what_is_missing_and_unexpected(tmp_path):
    config = model_config("llama2")
    tensors = random_tensors(config, torch.bfloat16)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["foo.weight"] = torch.zeros(1)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 4)
    tensors["model.norm.weight"] = torch.zeros(config.hidden_size, dtype=torch.int8)
    folder = write_hf_folder(tmp_path / "hf", tensors, config.to_hf("bf16"))
    message = refusal(folder, tmp_path)
    assert "missing: model.layers.1.mlp.up_proj.weight\n" in message
    assert "unexpected: foo.weight\n" in message
    assert "model.layers.0.mlp.up_proj.weight has shape [3, 4], the model needs [48, 32]" in message
    assert "model.norm.weight is torch.int8: only float32, bfloat16 and float16 weights" in message


def test_harmless_tensors_are_ignored_and_said(tmp_path):
    config = model_config("llama1")
    tensors = random_tensors(config, torch.float16)
    harmless = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(2) for i in range(4)}
    folder = write_hf_folder(tmp_path / "hf", {**tensors, **harmless}, config.to_hf("fp16"))
    result = write_hf(open_checkpoint(folder), Job(output=tmp_path / "out"))
    assert result.ignored == sorted(harmless)
    assert_same(read_folder(tmp_path / "out"), tensors)


def test_the_copy_of_a_tied_head(tmp_path):
    config = model_config("llama3.2")
    tensors = random_tensors(config, torch.bfloat16)
    embedding = tensors["model.embed_tokens.weight"]
    folder = write_hf_folder(tmp_path / "a", {**tensors, "lm_head.weight": embedding.clone()}, config.to_hf("bf16"))
    assert checked_weights(open_checkpoint(folder), None).ignored == ["lm_head.weight"]
    other = embedding.clone()
    other[3, 5] += 1
    folder = write_hf_folder(tmp_path / "b", {**tensors, "lm_head.weight": other}, config.to_hf("bf16"))
    message = refusal(folder, tmp_path)
    assert "first at [3, 5]" in message and "set tie_word_embeddings to false" in message


def test_an_untied_model_without_head(tmp_path):
    folder = make_source(tmp_path / "hf", "llama3.2")
    edit_json(folder / "config.json", lambda content: content.update(tie_word_embeddings=False))
    message = refusal(folder, tmp_path)
    assert "missing: lm_head.weight" in message and "set tie_word_embeddings to true" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, 'model_type "qwen2" is not supported'),
        ({"quantization_config": {"bits": 4}}, "use the unquantized weights"),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu" is not supported'),
        ({"model_type": "mistral", "sliding_window": 16}, "sliding"),
    ],
)
def test_other_models_are_refused_by_name(tmp_path, change, message):
    folder = make_source(tmp_path / "hf", "llama2")
    edit_json(folder / "config.json", lambda content: content.update(change))
    assert message in refusal(folder, tmp_path)


def test_both_styles_of_rope_are_read_and_written(tmp_path):
    """transformers 5 writes rope_parameters and dtype only; transformers 4 rope_theta, rope_scaling and torch_dtype."""
    folder = make_source(tmp_path / "hf", "llama3.1")
    wanted = json.loads((folder / "config.json").read_text())
    for style in (("rope_theta", "rope_scaling", "torch_dtype"), ("rope_parameters", "dtype")):
        content = {key: value for key, value in wanted.items() if key not in style}
        (folder / "config.json").write_text(json.dumps(content))
        write_hf(open_checkpoint(folder), Job(output=tmp_path / "out", overwrite=True))
        assert json.loads((tmp_path / "out" / "config.json").read_text()) == wanted


def test_folders_that_are_no_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match="there is no such folder"):
        open_checkpoint(tmp_path / "nothing" / "here")
    with pytest.raises(ConfigError, match="neither model.safetensors nor"):
        open_checkpoint(tmp_path)
    (tmp_path / "consolidated.00.pth").touch()
    with pytest.raises(ConfigError, match="Meta's own format, whose q and k rows are in another order"):
        open_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="it is a file"):
        open_checkpoint(tmp_path / "consolidated.00.pth")


def test_a_hub_name_without_a_network():
    with pytest.raises(ConfigError, match=r"hub.*cannot be reached.*hf download nobody/nothing"):
        open_checkpoint("nobody/nothing")


def test_a_hub_name_from_the_cache(tmp_path, monkeypatch):
    folder = make_source(tmp_path / "hf", "llama2")
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or str(folder))
    assert open_checkpoint("meta-llama/Llama-2-7b-hf").path == folder and asked == ["meta-llama/Llama-2-7b-hf"]


@pytest.fixture
def sharded(tmp_path):
    checkpoint = open_checkpoint(make_source(tmp_path / "hf", "llama2"))
    write_sharded(checkpoint, plan_layout(checkpoint.config(), 2, 2), Job(output=tmp_path / "sharded"))
    return tmp_path / "sharded"


@pytest.mark.parametrize("key", ["layout_version", "format", "checksum_algorithm"])
def test_a_foreign_layout_is_refused_whatever_its_shapes(sharded, tmp_path, key):
    for value in (99, None):
        edit_json(sharded / "manifest.json", lambda content, value=value: content.update({key: value}))
        message = refusal(sharded, tmp_path)
        assert f"{key} is {json.dumps(value)}, this package reads" in message


def test_without_manifest_it_is_not_complete(sharded, tmp_path):
    (sharded / "manifest.json").unlink()
    assert "without manifest is not complete" in refusal(sharded, tmp_path)


def test_files_that_are_not_those_of_the_manifest(sharded, tmp_path):
    file = sharded / "model-pp00-tp01.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    message = refusal(sharded, tmp_path)
    assert f"{file.name} has {len(content) - 1:,} bytes, the manifest says {len(content):,}" in message
    file.unlink()
    assert f"{file.name} is missing" in refusal(sharded, tmp_path)


def test_a_vocabulary_that_was_edited(sharded, tmp_path):
    config = model_config("llama2")
    edit_json(sharded / "config.json", lambda content: content.update(vocab_size=config.vocab_size - 3))
    size = (sharded / "config.json").stat().st_size
    edit_json(sharded / "manifest.json", lambda content: content["files"]["config.json"].update(size=size))
    assert "the manifest 131: one was edited" in refusal(sharded, tmp_path)


@pytest.mark.parametrize("where", ["tokenizer.json", "added_tokens.json", "tokenizer_config.json"])
def test_a_tokenizer_with_ids_beyond_the_model(tmp_path, where):
    folder = make_source(tmp_path / "hf", "llama2")
    content = {
        "tokenizer.json": {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 131}]},
        "added_tokens.json": {"<pad>": 131},
        "tokenizer_config.json": {"added_tokens_decoder": {"131": {}}},
    }[where]
    (folder / where).write_text(json.dumps(content))
    message = refusal(folder, tmp_path)
    assert "has the id 131, the model has vocab_size 131" in message and "resize_token_embeddings(132)" in message


def test_files_that_cannot_be_read(tmp_path):
    folder = make_source(tmp_path / "hf", "llama2", shards=2)
    (folder / "tokenizer.json").write_text("{")
    assert "tokenizer.json:\n  1. it cannot be read as JSON" in refusal(folder, tmp_path)
    (folder / "tokenizer.json").unlink()
    checkpoint = open_checkpoint(folder)
    shard = folder / "model-00001-of-00002.safetensors"
    shard.unlink()  # after its header was read
    with pytest.raises(ConfigError, match=f"{shard}:\n.*it cannot be read: No such file"):
        write_hf(checkpoint, Job(output=tmp_path / "out"))
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match="config.json"):
        checkpoint.config()


def test_the_order_of_the_model():
    names = list(hf_shapes(model_config("llama2")))
    assert names[0] == "model.embed_tokens.weight" and names[-2:] == ["model.norm.weight", "lm_head.weight"]
