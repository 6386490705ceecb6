"""The tensors of a Hugging Face LLaMA: every name with its shape."""

from __future__ import annotations

from hybrid.config.model import LlamaConfig


def hf_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor of the model's checkpoint, in the order of the model."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for index in range(config.num_hidden_layers):
        shapes.update(_layer_shapes(config, f"model.layers.{index}"))
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _layer_shapes(config: LlamaConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.input_layernorm.weight": (hidden,)}
    for block, projections, bias in (
        ("self_attn", attention, config.attention_bias),
        ("mlp", mlp, config.mlp_bias),
    ):
        for name, (rows, columns) in projections.items():
            shapes[f"{prefix}.{block}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}.{block}.{name}.bias"] = (rows,)
    shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    return shapes
