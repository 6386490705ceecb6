"""The FLOP formula against torch's counter, and the table of peaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig as HfConfig
from transformers import LlamaForCausalLM

from hybrid.config.model import LlamaConfig, load_model_config, num_parameters
from hybrid.metrics.flops import flops_per_token, matmul_parameters, peak_flops


@pytest.mark.parametrize(
    ("seq_length", "changes"),
    [
        (64, {}),
        (256, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        (128, {"head_dim": 32, "num_hidden_layers": 3, "vocab_size": 1031}),
    ],
)
def test_formula_is_what_torch_counts(seq_length: int, changes: dict[str, Any]) -> None:
    shape: dict[str, Any] = {
        "vocab_size": 257,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
    } | changes
    config = LlamaConfig.model_validate(shape)
    # Eager attention multiplies with the whole square that the causal formula halves.
    model = LlamaForCausalLM(HfConfig(**shape | {"attn_implementation": "eager"}))
    ids = torch.randint(0, 257, (2, seq_length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    halved = 6 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * seq_length
    expected = (flops_per_token(config, seq_length) + halved) * ids.numel()
    # The counter also sees the outer product of RoPE's table.
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)


def test_known_model() -> None:
    config = load_model_config("llama2-7b")
    embeddings_and_norms = 32000 * 4096 + (2 * 32 + 1) * 4096
    assert matmul_parameters(config) == num_parameters(config) - embeddings_and_norms == 6_607_077_376
    assert flops_per_token(config, 4096) == 6 * 6_607_077_376 + 6 * 32 * 4096 * 4096
    assert flops_per_token(config, 4096, frozen=True) == 4 * 6_607_077_376 + 6 * 32 * 4096 * 4096


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA A100 80GB PCIe", 312, 19.5),
        ("NVIDIA H100 80GB HBM3", 989, 67),
        ("NVIDIA H100 PCIe", 756, 51),
        ("NVIDIA H100 NVL", 835, 60),
        ("NVIDIA H200", 989, 67),
        ("NVIDIA B200", 2250, 75),
        ("NVIDIA GB200", 2500, 80),
        ("NVIDIA L40S", 362, 91.6),
        ("NVIDIA L4", 121, 30.3),
        ("NVIDIA A10", 125, 31.2),
        ("Tesla V100-SXM2-32GB", None, 15.7),
        ("Tesla V100-PCIE-16GB", None, 14),
        ("AMD Instinct MI300X", 1307.4, 163.4),
        ("NVIDIA A10G", None, None),
        ("NVIDIA GeForce GTX 1080", None, None),
        ("cpu", None, None),
    ],
)
def test_peaks_by_device_name(name: str, bf16: float | None, fp32: float | None) -> None:
    assert peak_flops(name, "bf16") == (bf16 and pytest.approx(bf16 * 1e12))
    assert peak_flops(name, "fp32") == (fp32 and pytest.approx(fp32 * 1e12))


def test_half_precision_without_bf16() -> None:
    assert peak_flops("Tesla V100-SXM2-32GB", "fp16") == 125e12
    assert peak_flops("Tesla T4", "fp16") == 65e12
