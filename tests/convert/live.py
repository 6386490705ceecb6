"""The running model that tests load weights into."""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist

from hybrid.config.model import LlamaConfig
from hybrid.config.parallel import ParallelConfig, split_layers
from hybrid.convert.load import load_weights
from hybrid.grid import Grid, build_grid
from hybrid.model.head import vocab_parallel_logits
from hybrid.pipeline.module import LlamaPipeline


def build(config: LlamaConfig, tp: int, pp: int, dtype: torch.dtype = torch.float32) -> tuple[LlamaPipeline, Grid]:
    """This rank's stage, its weights drawn from a seed."""
    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
    parallel = ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    grid = build_grid(parallel, config.num_key_value_heads)
    splits = split_layers(config.num_hidden_layers, pp)
    device = torch.device("cpu")
    return LlamaPipeline(config, grid, layers_per_stage=splits, dtype=dtype, device=device, seed=1), grid


def live_logits(config: LlamaConfig, tp: int, pp: int, source: str, ids: torch.Tensor) -> torch.Tensor | None:
    """Logits [b, s, V] on the ranks of the last stage, None elsewhere."""
    module, grid = build(config, tp, pp)
    load_weights(module, config, source)
    module.eval()
    with torch.no_grad():
        x = ids
        if not grid.is_first_stage:
            x = torch.empty(ids.size(1), ids.size(0), config.hidden_size)
            dist.recv(x, grid.rank - tp)
        x = module(x)
        if not grid.is_last_stage:
            dist.send(x, grid.rank + tp)
            return None
        local = vocab_parallel_logits(*x, module.tp).transpose(0, 1).contiguous()
        if tp == 1:
            return local[..., : config.vocab_size]
        parts = [torch.empty_like(local) for _ in range(tp)]
        dist.all_gather(parts, local, group=grid.tensor_group)
        return torch.cat(parts, dim=-1)[..., : config.vocab_size]
