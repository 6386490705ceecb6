"""DeepSpeed's native layer files: which parameters each holds."""

from __future__ import annotations

from collections.abc import Iterator

from hybrid.config.model import LlamaConfig
from hybrid.convert.names import Layer, pipeline_layers


def layer_file(index: int, tp_rank: int) -> str:
    """The name PipelineModule gives the file of a pipeline layer; stages do not appear in it."""
    return f"layer_{index:02d}-model_{tp_rank:02d}-model_states.pt"


def layer_tensors(config: LlamaConfig, tp_size: int, tp_rank: int) -> Iterator[tuple[int, Layer]]:
    """(index, parameters) of every pipeline layer that DeepSpeed saves: not the head that is the embedding."""
    layers = pipeline_layers(config, tp_size, tp_rank)
    yield from enumerate(layers[:-1] if config.tie_word_embeddings else layers)
