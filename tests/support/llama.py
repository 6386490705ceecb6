"""Small random LLaMAs: the oracle on one process, and engines at any layout."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

from hybrid.config.model import LlamaConfig
from hybrid.config.parallel import ParallelConfig, split_layers
from hybrid.config.training import LoraConfig
from hybrid.grid import Grid, build_grid
from hybrid.optim.build import optimizer_factory
from hybrid.optim.engine import HybridEngine
from hybrid.optim.settings import OptimizerSettings
from hybrid.pipeline.lora import add_adapters
from hybrid.pipeline.module import LlamaPipeline
from hybrid.tensor_parallel.params import named_segments

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
}


def small_config(**changes: Any) -> LlamaConfig:
    """The small model with some fields changed."""
    return LlamaConfig.from_hf({**SMALL, **changes})


def reference_model(config: LlamaConfig, seed: int) -> Any:
    """transformers' model, fp32, with the weights this package draws from `seed`."""
    from transformers import LlamaConfig as HFConfig
    from transformers import LlamaForCausalLM

    from hybrid.model.init import initial_tensor

    model = LlamaForCausalLM(HFConfig(**config.to_hf("fp32"), attn_implementation="sdpa")).float()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() == 2:
                param.copy_(initial_tensor(seed, name, param.shape, config.initializer_range))
            else:
                param.fill_(1.0 if name.endswith("weight") else 0.0)
    return model


def make_batches(count: int, batch: int, seq: int, vocab: int, *, masked: bool = True, seed: int = 7) -> list[Any]:
    """`count` microbatches of (tokens, shifted labels), each [batch, seq], with uneven masks."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for index in range(count):
        ids = torch.randint(0, vocab, (batch, seq + 1), generator=generator)
        labels = ids[:, 1:].clone()
        if masked:
            labels[:, : index % 5] = -100
        batches.append((ids[:, :-1].contiguous(), labels))
    return batches


def reference_loss(model: Any, batches: list[Any]) -> torch.Tensor:
    """Mean loss over all supervised tokens of all microbatches."""
    ids, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    logits = model(input_ids=ids).logits.float()
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (labels != -100).sum()


def train_reference(
    model: Any, steps: list[list[Any]], kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss of each step and the final weights of one process with torch's optimizer, the norm clipped at 1.

    Norms and biases do not decay; a step without a label changes nothing, and its loss counts as 0.
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    matrices, vectors = ([p for p in trained if (p.dim() > 1) == wide] for wide in (True, False))
    optimizer = kind([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], **options)  # type: ignore[call-arg]
    losses = []
    for batches in steps:
        if all((labels == -100).all() for _, labels in batches):
            losses.append(0.0)
            continue
        optimizer.zero_grad()
        loss = reference_loss(model, batches)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}


def make_engine(
    config: LlamaConfig,
    *,
    tp: int = 1,
    pp: int = 1,
    sp: bool = False,
    stage: int = 1,
    micro_batches: int = 1,
    batch: int = 2,
    seq: int = 8,
    seed: int = 5,
    dtype: torch.dtype = torch.float32,
    recompute: str = "none",
    optimizer: str = "AdamW",
    options: dict[str, Any] | None = None,
    bucket_size: int = 5000,
    layers_per_stage: tuple[int, ...] | None = None,
    chunks: int = 1,
    lora: LoraConfig | None = None,
    **settings: Any,
) -> tuple[HybridEngine, Grid]:
    """An engine over the running world, interleaved with `chunks`; what tp and pp leave is data parallel."""
    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
    dp = dist.get_world_size() // (tp * pp)
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, data_parallel_size=dp, sequence_parallel=sp
    )
    grid = build_grid(parallel, config.num_key_value_heads)
    module = LlamaPipeline(
        config,
        grid,
        layers_per_stage=layers_per_stage or split_layers(config.num_hidden_layers, pp * chunks),
        dtype=dtype,
        device=torch.device("cpu"),
        seed=seed,
        recompute=recompute,
    )
    if lora is not None:
        add_adapters(module, lora, grid, seed)
    ds_config = {
        "train_batch_size": batch * micro_batches * dp,
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": micro_batches,
        "zero_optimization": {"stage": 1},
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False, "use_reentrant": False},
    }
    engine = HybridEngine(
        module,
        grid,
        ds_config,
        OptimizerSettings(
            stage=stage,
            bucket_size=bucket_size,
            nominal_tokens=batch * micro_batches * dp * seq,
            **{"gradient_clipping": 1.0, **settings},
        ),
        optimizer_factory(optimizer, options or {"lr": 1e-2, "weight_decay": 0.1}),
        lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1.0),
    )
    return engine, grid


def my_batches(batches: list[Any], grid: Grid, micro_batches: int) -> list[Any]:
    """This data-parallel rank's share of the microbatches of each step, in order."""
    dp = grid.parallel.data_parallel_size
    per_step = micro_batches * dp
    start = grid.data_rank * micro_batches
    return [b for i, b in enumerate(batches) if start <= i % per_step < start + micro_batches]


def recut(batches: list[Any], count: int) -> list[Any]:
    """The same samples as `count` microbatches."""
    ids, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return list(zip(ids.chunk(count), labels.chunk(count), strict=True))


def train_engine(
    engine: HybridEngine, grid: Grid, steps: list[list[Any]], micro_batches: int, weights: dict[str, torch.Tensor]
) -> tuple[list[float], float]:
    """The loss of each step, its samples in so many microbatches a rank, and the final weights' largest error."""
    losses = []
    for batches in steps:
        cut = recut(batches, micro_batches * grid.parallel.data_parallel_size)
        loss, result = engine.train_batch(iter(my_batches(cut, grid, micro_batches))), engine.optimizer.result
        assert result is not None
        assert result.skipped or loss.item() == pytest.approx(result.loss)
        losses.append(result.loss)
    engine.optimizer.wait_parameters()
    return losses, compare_with(engine.module, weights, lambda p: p.detach())


def compare_with(module: LlamaPipeline, tensors: dict[str, torch.Tensor], values: Any) -> float:
    """Largest relative error of `values(param)[segment]` against the slices of `tensors`, over this rank's segments."""
    worst = 0.0
    for param, segment in named_segments(module):
        want = tensors[segment.hf_name][segment.source]
        got = values(param)[segment.local]
        worst = max(worst, float((got - want).norm() / (want.norm() + 1e-12)))
    return worst
