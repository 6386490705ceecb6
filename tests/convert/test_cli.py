"""launch/convert.py as a user runs it: outcomes, messages, exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from convert.cases import assert_same, make_source, model_config, random_tensors, read_folder, write_hf_folder
from safetensors.torch import load_file, save_file

from hybrid.convert.cli import main
from hybrid.convert.logits import our_logits, reference_logits, sample_tokens
from hybrid.convert.sources import open_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(capsys):
    """`run(*words)`: exit code and what was printed."""

    def call(*words):
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return call


def test_the_script(tmp_path):
    source = make_source(tmp_path / "hf", "llama3", shards=2)

    def script(*words):
        command = [sys.executable, "launch/convert.py", *map(str, words)]
        return subprocess.run(command, cwd=ROOT, text=True, capture_output=True)

    done = script("to-sharded", "--hf", source, "--output", tmp_path / "s", "--tp", 4, "--pp", 2, "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert "8 files of weights" in done.stdout and "GB/s" in done.stdout
    assert script("to-sharded", "--hf", source, "--output", tmp_path / "x", "--tp", 3).returncode == 2


def test_every_command(tmp_path, run):
    source = make_source(tmp_path / "hf", "biases")
    one, other, back = tmp_path / "one", tmp_path / "other", tmp_path / "back"
    assert run("to-sharded", "--hf", source, "--output", one, "--tp", 4, "--pp", 2, "--pipeline_split", "3,1")[0] == 0
    assert run("to-sharded", "--checkpoint", one, "--output", other, "--tp", 2, "--format", "deepspeed")[0] == 0
    code, output = run("to-hf", "--checkpoint", other, "--output", back, "--max_shard_size", "30KB")
    assert code == 0 and len(list(back.glob("*.safetensors"))) > 2, output
    assert_same(read_folder(back), read_folder(source))
    for folder in (one, other, back):
        code, output = run("verify", "--hf", source, "--checkpoint", folder, "--logits")
        assert code == 0 and "bitwise the same" in output and "logits" in output, output
        code, output = run("inspect", folder, "--checksums")
        assert code == 0 and "nothing is wrong with it" in output, output
    code, output = run("inspect", one)
    assert "tensor 4 x pipeline 2 (3 + 1 layers)" in output and "padded to 512" in output
    lines = [line.split() for line in output.splitlines() if line.startswith("model-pp")]
    assert [line[0] for line in lines] == [f"model-pp{p:02d}-tp{t:02d}.safetensors" for p in (0, 1) for t in range(4)]
    assert [line[1] for line in lines] == ["0-2"] * 4 + ["3"] * 4
    assert lines[0][4:] == ["embedding"] and lines[4][4:] == ["final", "norm,", "head"] and lines[6][4:] == []


def test_logits_tell_models_apart(tmp_path):
    """The whole of the comparison that `verify --logits` makes, with a model that does not fit into memory."""
    for name in ("llama3.1", "llama3.2"):
        source = make_source(tmp_path / name, name)
        checkpoint = open_checkpoint(source)
        ids = sample_tokens(checkpoint.config(), 16)
        ours = our_logits(checkpoint, ids)
        for memory in (None, 60_000):  # the second has most layers on the disk
            torch.testing.assert_close(ours, reference_logits(source, ids, memory), rtol=0, atol=1e-5)
    changed = json.loads((source / "config.json").read_text())
    changed["rope_theta"] = changed["rope_parameters"]["rope_theta"] = 77.0
    (source / "config.json").write_text(json.dumps(changed))
    assert float((ours - reference_logits(source, ids)).abs().max()) > 1e-3


def test_verify_names_what_differs(tmp_path, run):
    config = model_config("llama2")
    tensors = random_tensors(config, torch.bfloat16)
    one = write_hf_folder(tmp_path / "one", tensors, config.to_hf("bf16"))
    tensors["model.layers.2.mlp.down_proj.weight"][5, 7] += 1
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    changed = config.model_copy(update={"rms_norm_eps": 1e-6})
    other = write_hf_folder(tmp_path / "other", tensors, changed.to_hf("bf16"))
    code, output = run("verify", "--hf", one, "--checkpoint", other, "--workers", 2)
    assert code == 1 and "3 differences" in output
    assert "model.layers.2.mlp.down_proj.weight: first at [5, 7]" in output
    assert "model.norm.weight: torch.bfloat16 and torch.float32" in output
    assert "config.json: rms_norm_eps 0.01 and 1e-06" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp", 3], "valid tensor_model_parallel_size values for this model are 1, 2, 4, 8"),
        (["--pp", 5], "valid pipeline_model_parallel_size values for this model are 1 to 4"),
        (["--pp", 2, "--pipeline_split", "3,2"], "covers 5 of num_hidden_layers 4"),
        (["--tp", 0], "tensor_model_parallel_size"),
        (["--workers", 0], "--workers is 0"),
    ],
)
def test_what_is_refused(tmp_path, run, words, message):
    source = make_source(tmp_path / "hf", "llama2")
    code, output = run("to-sharded", "--hf", source, "--output", tmp_path / "out", *words)
    assert code == 2 and message in output and "Traceback" not in output
    assert not (tmp_path / "out").exists()


def test_two_faults_are_told_at_once(tmp_path, run):
    source = make_source(tmp_path / "hf", "llama2")
    code, output = run("to-sharded", "--hf", source, "--output", tmp_path / "out", "--tp", 3, "--pp", 9)
    assert code == 2 and "num_attention_heads 8" in output and "num_hidden_layers 4" in output


def test_a_size_that_is_none(tmp_path, run):
    source = make_source(tmp_path / "hf", "llama2")
    code, output = run("to-hf", "--hf", source, "--output", tmp_path / "out", "--max_shard_size", "5 gallons")
    assert code == 2 and "'5 gallons' is not a size like 5GB" in output


def test_inspect_a_hugging_face_folder(tmp_path, run):
    source = make_source(tmp_path / "hf", "llama3.2")
    (source / "tokenizer.json").write_text('{"model": {"vocab": {"a": 130}}}')
    code, output = run("inspect", source)
    assert code == 0
    for part in ("Hugging Face safetensors", "tied embeddings", "RoPE llama3", "bfloat16", "tokenizer.json", "131"):
        assert part in output
    code, output = run("inspect", tmp_path)
    assert code == 1 and "is it a checkpoint?" in output


def test_inspect_finds_changed_bytes(tmp_path, run):
    source, sharded = make_source(tmp_path / "hf", "llama2"), tmp_path / "sharded"
    (source / "tokenizer.json").write_text("{}")
    run("to-sharded", "--hf", source, "--output", sharded, "--tp", 2)
    file = sharded / "model-pp00-tp01.safetensors"
    held = load_file(file)
    name = "model.layers.3.self_attn.q_proj.weight"
    at = file.read_bytes().index(held[name].view(torch.uint8).numpy().tobytes())
    content = bytearray(file.read_bytes())
    content[at + 9] ^= 1
    file.write_bytes(content)
    (sharded / "tokenizer.json").write_text("[]")
    code, output = run("inspect", sharded)
    assert code == 0 and "bytes       not read" in output and "--checksums" in output  # sizes are right
    for command in ("to-hf", "to-sharded"):
        code, output = run(command, "--checkpoint", sharded, "--output", tmp_path / "out", "--checksums")
        assert code == 2 and f"{name} in {file.name} was changed" in output and "tokenizer.json was changed" in output
        assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "sharded"]
    code, output = run("inspect", sharded, "--checksums")
    assert code == 1 and f"{name} in {file.name} was changed" in output and "tokenizer.json was changed" in output
    assert output.count("was changed") == 2
    save_file(held, file)
    code, output = run("inspect", sharded)
    assert code == 1 and "bytes, the manifest says" in output


def test_help(capsys):
    for words in (["--help"], ["to-sharded", "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 0
    with pytest.raises(SystemExit) as caught:
        main(["to-sharded", "--output", "x"])
    assert caught.value.code == 2 and "--hf --checkpoint" in capsys.readouterr().err


def test_nothing_of_the_training_is_imported():
    code = "import sys, hybrid.convert.cli; assert not {'deepspeed', 'transformers', 'datasets'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
