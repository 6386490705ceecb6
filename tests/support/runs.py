"""Whole training runs of a small model inside the pool's workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from support.llama import SMALL

from hybrid.config.resolve import resolve_config
from hybrid.data.indexed import IndexedWriter
from hybrid.optim.state import named_state
from hybrid.tensor_parallel.params import param_spec
from hybrid.trainer import Trainer

Layout = tuple[int, int, int, int]
"""Tensor, pipeline and data parallel size, ZeRO stage."""

VOCAB = 131


def write_tokens(folder: Path, documents: int = 40, seed: int = 0, vocab: int = VOCAB) -> str:
    """A token file; its prefix."""
    generator = np.random.default_rng(seed)
    prefix = folder / "tokens"
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(documents):
            writer.add(generator.integers(1, vocab, int(generator.integers(5, 60))))
            writer.end_document()
        writer.finish()
    return str(prefix)


def tree(folder: Path, tokens: str, layout: Layout, **changes: Any) -> dict[str, Any]:
    """A configuration; `changes` go to the section that has the key."""
    tp, pp, _, stage = layout
    training: dict[str, Any] = {"train_steps": 8, "output_dir": str(folder), "seed": 3}
    hybrid: dict[str, Any] = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "sequence_parallel": False,
        "model": {**SMALL, **changes.pop("model", {})},
        "checkpoint": changes.pop("checkpoint", {}),
        "optimizer": {},
    }
    data: dict[str, Any] = {
        "source": tokens, "seq_length": 8, "eval_fraction": 0.0, "cache_dir": str(Path(tokens).parent / "cache"),
    }  # fmt: skip
    top: dict[str, Any] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": changes.pop("bucket_size", 5000)},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    }
    for key, value in changes.items():
        if key in ("sequence_parallel", "pipeline_schedule", "pipeline_chunks", "lora"):
            hybrid[key] = value
        elif key in ("source", "seq_length", "eval_fraction"):
            data[key] = value
        elif key in top or key in ("bf16", "fp16", "scheduler", "gradient_clipping"):
            top[key] = value
        else:
            training[key] = value
    if "scheduler" in top:
        training["lr_schedule"] = None
    return {**top, "hybrid": {**hybrid, "data": data, "training": training}}


def make_trainer(config: dict[str, Any]) -> Trainer:
    """The trainer of this rank of the running world."""
    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
    return Trainer(resolve_config(config, dist.get_world_size()), torch.device("cpu"))


def watch_samples(trainer: Trainer) -> list[list[tuple[int, ...]]]:
    """The token rows of each step from now on, as this rank gets them."""
    seen: list[list[tuple[int, ...]]] = []
    train_batch = trainer.engine.train_batch

    def logging(batches: Any) -> Any:
        rows: list[tuple[int, ...]] = []

        def watched() -> Iterator[Any]:
            for batch in batches:
                rows.extend(tuple(row.tolist()) for row in batch[0])
                yield batch

        result = train_batch(watched())
        seen.append(rows)
        return result

    trainer.engine.train_batch = logging  # type: ignore[method-assign]
    return seen


def whole_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """This rank's slices of weights and states by `name/kind`, whole over the data-parallel ranks.

    Put together without the code under test: each piece into a zero tensor of the parameter's size, summed.
    """
    optimizer, grid = trainer.engine.optimizer, trainer.grid
    optimizer.wait_parameters()
    result: dict[str, torch.Tensor] = {}
    values: dict[tuple[int, str], torch.Tensor] = {}
    kinds = [kind for kind in ("master", "exp_avg", "exp_avg_sq", "momentum_buffer")]
    present = {kind for kind, _, _ in named_state(optimizer)}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, present)
    kinds = [kind for kind in kinds if any(kind in found for found in gathered)]
    for index, param in enumerate(optimizer.params):
        for kind in kinds:
            values[index, kind] = torch.zeros(param.numel())
    for kind, piece, flat in named_state(optimizer):
        if kind in kinds:
            values[piece.index, kind][piece.start : piece.stop] = flat
    for (index, kind), value in values.items():
        if optimizer.layout.num_shards > 1:
            dist.all_reduce(value, group=grid.data_group)
        param = optimizer.params[index]
        for segment in param_spec(param).segments:
            if segment.shard.length:
                result[f"{segment.hf_name}/{kind}/{segment.source}"] = value.view(param.shape)[segment.local].clone()
                result[f"{segment.hf_name}/weight/{segment.source}"] = param.detach()[segment.local].clone()
    return result


def assemble(per_rank: list[dict[str, torch.Tensor]], shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Whole tensors by `name/kind`; slices held by several ranks must be alike."""
    whole: dict[str, torch.Tensor] = {}
    filled: dict[str, torch.Tensor] = {}
    for slices in per_rank:
        for key, value in slices.items():
            name, kind, text = key.split("/")
            index = eval(text)  # a tuple of slices, as `repr` wrote it
            full = whole.setdefault(f"{name}/{kind}", torch.zeros(shapes[name], dtype=value.dtype))
            done = filled.setdefault(f"{name}/{kind}", torch.zeros(shapes[name], dtype=torch.bool))
            assert torch.equal(full[index][done[index]], value[done[index]]), f"replicas of {name} {kind} differ"
            full[index], done[index] = value, True
    assert all(bool(done.all()) for done in filled.values())
    return whole


def run(config: dict[str, Any], *, keep_initial: bool = False) -> dict[str, Any]:
    """Train; what a test may want to know of this rank."""
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()):
        trainer = make_trainer(config)
        initial = whole_state(trainer) if keep_initial else None
        seen = watch_samples(trainer)
        code = trainer.train()
        return {
            "code": code,
            "step": trainer.step,
            "samples": seen,
            "initial": initial,
            "final": whole_state(trainer),
            "lr": trainer.engine.get_lr(),
            "loss_scale": trainer.engine.optimizer.loss_scale,
            "shards": trainer.engine.optimizer.layout.num_shards,
        }
