"""Models as they are in the wild, made small, and their checkpoints written by other libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.llama import small_config

from hybrid.config.model import LlamaConfig
from hybrid.convert.names import hf_shapes

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

BASE = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4, "intermediate_size": 48}

# Name: (changes to the small model, dtype of its weights).
MODELS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "llama1": ({"num_key_value_heads": 8, "max_position_embeddings": 2048}, torch.float16),
    "llama2": ({"num_key_value_heads": 4, "rms_norm_eps": 1e-2}, torch.bfloat16),
    "llama3": ({"rope_theta": 500000.0, "vocab_size": 32003}, torch.bfloat16),
    "llama3.1": ({"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE}, torch.bfloat16),
    "llama3.2": ({"tie_word_embeddings": True, "rope_scaling": LLAMA3_ROPE}, torch.bfloat16),
    "codellama": ({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4.0}}, torch.bfloat16),
    "mqa": ({"num_key_value_heads": 1}, torch.float32),
    "kv_below_tp": ({"num_key_value_heads": 2}, torch.float32),
    "biases": ({"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2}, torch.float32),
    "head_dim": ({"head_dim": 6, "num_hidden_layers": 7}, torch.float16),
    "odd_layers": ({"num_hidden_layers": 5, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, torch.float32),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "tie_word_embeddings": True}, torch.float32),
    "extended": ({"vocab_size": 133, "tie_word_embeddings": True, "attention_bias": True}, torch.float16),
    "mistral": ({"model_type": "mistral", "sliding_window": None}, torch.bfloat16),
}


def model_config(name: str) -> LlamaConfig:
    """The configuration of a model of the table."""
    return small_config(**{**BASE, **MODELS[name][0]})


def random_tensors(config: LlamaConfig, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of the model, norms about 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * 0.1 + ("norm" in name)).to(dtype)
        for name, shape in hf_shapes(config).items()
    }


def write_hf_folder(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], shards: int = 1) -> Path:
    """A Hugging Face directory, its weights written by safetensors itself."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(tensors)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[number::shards]
        save_file({name: tensors[name] for name in mine}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(mine, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def make_source(folder: Path, name: str, shards: int = 1) -> Path:
    """A checkpoint of a model of the table."""
    config, dtype = model_config(name), MODELS[name][1]
    raw = config.to_hf(str(dtype).removeprefix("torch."))
    return write_hf_folder(folder, random_tensors(config, dtype), raw, shards)


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a Hugging Face directory, read by safetensors itself."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found = load_file(path)
        assert not tensors.keys() & found.keys(), "each tensor once"
        tensors.update(found)
    return tensors


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Names, dtypes, shapes and bits."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
