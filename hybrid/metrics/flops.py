"""Floating-point operations of training, and what devices can do per second."""

from __future__ import annotations

import re

from hybrid.config.model import LlamaConfig


def matmul_parameters(config: LlamaConfig) -> int:
    """Weights that a token is multiplied with: all projections and the output head, but not the embedding (a lookup).

    The true vocabulary counts, not its padding; a tied head counts, as it is multiplied with all the same.
    """
    h, q = config.hidden_size, config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    layer = h * (q + 2 * kv) + q * h + 3 * h * config.intermediate_size
    return config.num_hidden_layers * layer + h * config.vocab_size


def flops_per_token(config: LlamaConfig, seq_length: int, *, frozen: bool = False) -> float:
    """Model FLOPs to train on one token of a sequence of `seq_length`: 6 P + 6 L a d s.

    * P matmul parameters: 2 per weight forward, and twice that backward (input and weight gradients). `frozen` weights
      under adapters have no gradient: 4 P, and the adapters' own products are not counted.
    * Attention in each of L layers, a heads of width d: QK^T and AV are 2 d per pair of positions each, so 4 a d s per
      token if all s positions were seen. The causal mask leaves half of them: 2 a d s, times 3 for training.

    Recomputed activations are not counted (PaLM, Chowdhery et al. 2022, appendix B: model FLOPs utilisation); PaLM's
    formula has 12 L a d s because it does not halve. Documents packed into the sequence do not see each other, which
    costs less than is counted.
    """
    attention = 6 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * seq_length
    return float((4 if frozen else 6) * matmul_parameters(config) + attention)


# Dense peaks in TFLOP/s as (fp16, bf16, fp32) from the vendors' datasheets: tensor cores without sparsity, fp32 without
# TF32, as torch multiplies by default. The first pattern found in the device's name counts.
_PEAKS: tuple[tuple[str, float | None, float | None, float], ...] = (
    (r"GB200", 2500, 2500, 80),
    (r"B200", 2250, 2250, 75),
    (r"H200 NVL", 835, 835, 60),
    (r"H200", 989, 989, 67),
    (r"H100 NVL", 835, 835, 60),
    (r"H[18]00 PCIe", 756, 756, 51),
    (r"H[18]00", 989, 989, 67),
    (r"H20", 148, 148, 44),
    (r"A[18]00", 312, 312, 19.5),
    (r"A40", 149.7, 149.7, 37.4),
    (r"A30", 165, 165, 10.3),
    (r"A10", 125, 125, 31.2),
    (r"L40S", 362, 362, 91.6),
    (r"L40", 181, 181, 90.5),
    (r"L4", 121, 121, 30.3),
    (r"V100.*PCIE", 112, None, 14),
    (r"V100", 125, None, 15.7),
    (r"T4", 65, None, 8.1),
    (r"RTX A6000", 154.8, 154.8, 38.7),
    (r"RTX 4090", 165.2, 165.2, 82.6),
    (r"RTX 3090", 71, 71, 35.6),
    (r"MI325X", 1307.4, 1307.4, 163.4),
    (r"MI300X", 1307.4, 1307.4, 163.4),
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """FLOP/s a device reaches at best in `fp16`, `bf16` or `fp32`; None for a device that is not in the table.

    Args:
        device_name: as `torch.cuda.get_device_name` gives it.
    """
    column = {"fp16": 0, "bf16": 1, "fp32": 2}[dtype]
    for pattern, *peaks in _PEAKS:
        # Whole words only: an A10G is not an A10.
        if re.search(rf"(?<![A-Z0-9]){pattern}(?![A-Z0-9])", device_name, re.IGNORECASE):
            peak = peaks[column]
            return None if peak is None else peak * 1e12
    return None
