"""Writes the adapters, from whatever layout, as a directory that PEFT loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from hybrid.agreement import together
from hybrid.checkpoint.export import SaveTokenizer, collected
from hybrid.config.model import LlamaConfig
from hybrid.config.training import LoraConfig
from hybrid.convert.files import staged, write_json
from hybrid.convert.names import hf_shapes
from hybrid.grid import Grid
from hybrid.tensor_parallel.lora import Whole, model_adapter_shapes
from hybrid.tensor_parallel.params import Segment

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def export_adapter(
    module: nn.Module,
    whole: Whole,
    grid: Grid,
    config: LlamaConfig,
    lora: LoraConfig,
    directory: Path,
    *,
    base: str | None,
    save_tokenizer: SaveTokenizer | None = None,
) -> None:
    """Write `directory` with the adapters' matrices, their configuration and the tokenizer; a collective call.

    The matrices are written in fp32, in which PEFT keeps adapters while it trains, and into which it casts those it
    loads onto a model in half precision.

    Args:
        whole: gives A and B of this rank in fp32: the masters.
        base: the folder or name of the weights the adapters were trained on.

    Raises:
        CheckpointError: the directory cannot be written; RemoteError on the other ranks.
    """

    def values(param: nn.Parameter, segment: Segment) -> torch.Tensor:
        return whole(param)[segment.local]

    shapes = model_adapter_shapes(hf_shapes(config), lora.r, lora.targets)
    tensors = dict(collected(module, grid, shapes, values, torch.float32))

    def write() -> None:
        if grid.rank == 0:
            with staged(directory, overwrite=True, size=sum(tensor.nbytes for tensor in tensors.values())) as staging:
                save_file(tensors, staging / WEIGHTS, metadata={"format": "pt"})
                if save_tokenizer is not None:
                    save_tokenizer(staging)
                write_json(staging / CONFIG, peft_config(lora, base))

    together(write)


def peft_config(lora: LoraConfig, base: str | None) -> dict[str, Any]:
    """The adapter_config.json of PEFT."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
