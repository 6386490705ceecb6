"""A chosen layout as a configuration file for training."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from hybrid.planner.workload import Workload

_BASE: dict[str, Any] = {
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "hybrid": {"training": {"lr_schedule": {"type": "cosine", "warmup_steps": 2000}}},
}


def config_of(w: Workload, model: str | Mapping[str, Any], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The configuration tree that trains `w`, with what it does not decide taken from `base`.

    Args:
        model: what `hybrid.model` is to say.
    """
    tree: dict[str, Any] = copy.deepcopy(dict(base if base is not None else _BASE))
    tree["train_batch_size"] = w.micro_batch_size * w.micro_batches * w.d
    tree["train_micro_batch_size_per_gpu"] = w.micro_batch_size
    tree["gradient_accumulation_steps"] = "auto"
    tree["zero_optimization"] = {**tree.get("zero_optimization", {}), "stage": w.zero_stage}
    for name in ("bf16", "fp16"):
        if name == w.precision or name in tree:
            tree[name] = {**tree.get(name, {}), "enabled": name == w.precision}
    hybrid = tree.setdefault("hybrid", {})
    hybrid["tensor_model_parallel_size"] = w.t
    hybrid["pipeline_model_parallel_size"] = w.p
    hybrid["sequence_parallel"] = w.parallel.sequence_parallel
    for name in ("pipeline_schedule", "pipeline_chunks"):  # the base's schedule is that of the base's layout
        hybrid.pop(name, None)
    if w.chunks > 1:
        hybrid |= {"pipeline_schedule": "interleaved", "pipeline_chunks": w.chunks}
    hybrid["pipeline_split"] = list(w.layers_per_stage) if w.p > 1 else None
    hybrid["recompute"] = w.recompute
    hybrid["model"] = dict(model) if isinstance(model, Mapping) else model
    hybrid["data"] = {"source": "demo", **hybrid.get("data", {}), "seq_length": w.seq_length}
    if w.zero_stage == 2:
        hybrid["optimizer"] = {**hybrid.get("optimizer", {}), "gradient_sharding": w.gradient_sharding}
    return tree
