"""The running model, at any layout, as a Hugging Face directory."""

import errno
import json
import os
from unittest import mock

import pytest
import torch
from convert.cases import assert_same, make_source, model_config, read_folder
from convert.live import build

from hybrid.agreement import RemoteError
from hybrid.checkpoint import export
from hybrid.checkpoint.export import export_hf
from hybrid.config.errors import ConfigError
from hybrid.convert.load import load_weights
from hybrid.tensor_parallel.params import named_segments

LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)]


def load_and_export(config, tp, pp, source, output, dtype, limit):
    module, grid = build(config, tp, pp, dtype)
    load_weights(module, config, source)
    with mock.patch.object(export, "MAX_SHARD_BYTES", limit):
        export_hf(module, grid, config, output, lambda folder: (folder / "tokenizer.json").write_text("{}"))


@pytest.mark.parametrize("name", ["llama3.2", "biases", "kv_below_tp", "mqa", "extended", "odd_layers"])
def test_what_was_loaded_is_exported(tmp_path, pool, name):
    source = make_source(tmp_path / "hf", name)
    wanted = read_folder(source)
    dtype = next(iter(wanted.values())).dtype
    for tp, pp in LAYOUTS:
        output = tmp_path / f"{tp}{pp}"
        pool.run(load_and_export, tp * pp, model_config(name), tp, pp, str(source), output, dtype, 20000)
        assert_same(read_folder(output), wanted)
        assert (output / "config.json").read_text() == json_of(model_config(name), dtype)
        assert (output / "tokenizer.json").exists() and (output / "model.safetensors.index.json").exists()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def json_of(config, dtype):
    return json.dumps(config.to_hf(str(dtype).removeprefix("torch.")), indent=2) + "\n"


def export_on_a_full_disk(config, output):
    """The error of this rank."""
    module, grid = build(config, 2, 2)
    calls, real = [], os.pwrite

    def pwrite(fd, data, position):
        calls.append(position)
        if len(calls) > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, position)

    os.pwrite = pwrite
    try:
        export_hf(module, grid, config, output)
    except (ConfigError, RemoteError) as error:
        return type(error).__name__, str(error)
    finally:
        os.pwrite = real


def test_a_full_disk_ends_every_rank(tmp_path, pool):
    results = pool.run(export_on_a_full_disk, 4, model_config("llama2"), tmp_path / "out", timeout=30)
    assert [kind for kind, _ in results] == ["CheckpointError", *["RemoteError"] * 3]
    assert all("the disk is full" in message for _, message in results)
    assert not list(tmp_path.iterdir())


def test_padding_is_not_exported(tmp_path, pool):
    pool.run(export_with_padding, 2, model_config("extended"), tmp_path / "out")
    tensors = read_folder(tmp_path / "out")
    assert tensors["model.embed_tokens.weight"].shape[0] == 133
    assert not any(bool((tensor == 7).any()) for tensor in tensors.values())


def export_with_padding(config, output):
    module, grid = build(config, 2, 1)
    with torch.no_grad():
        values = [(param, segment, param[segment.local].clone()) for param, segment in named_segments(module)]
        for param in module.parameters():
            param.fill_(7)
        for param, segment, value in values:
            param[segment.local] = value
    export_hf(module, grid, config, output)
