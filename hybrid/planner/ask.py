"""From what a user asks to the searches that answer it."""

from __future__ import annotations

import dataclasses
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid.config.errors import ConfigError
from hybrid.config.model import load_model_config, preset_names, read_model_json
from hybrid.config.resolve import resolve_config
from hybrid.planner.hardware import load_gpu
from hybrid.planner.runs import workload_of
from hybrid.planner.search import Candidate, Request, search

MOST_GPUS = 16384
"""Where the search for a number of GPUs that is enough ends."""
_MODELS = Path(__file__).parent / "models"
"""Shapes of models larger than any preset, to plan with."""


def gpu_counts(text: str) -> list[int]:
    """`8,64` as numbers; an error that argparse reports for anything else."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not a number of GPUs, or several with commas, as 8,64") from error
    if min(counts) < 1:
        raise ArgumentTypeError(f"{min(counts)} is no number of GPUs: it must be at least 1")
    return counts


def planner_model(name: str) -> str | dict[str, Any]:
    """What `hybrid.model` says for a model: a preset by name, everything else by content."""
    if name in preset_names():
        return name
    path = _MODELS / f"{name}.json"
    return read_model_json(str(path) if path.exists() else name)


def request_of(
    base: Mapping[str, Any] | None,
    model: str | None,
    gpus: int,
    gpu: str,
    seq_length: int | None,
    global_batch: int | None,
) -> Request:
    """One search: what is not given comes from the configuration tree `base`, or from the defaults.

    Raises:
        ConfigError: a model, GPU or configuration is not there or not sound.
    """
    for name, value in (("--seq_length", seq_length), ("--global_batch", global_batch)):
        if value is not None and value < 1:
            raise ConfigError([f"{name} is {value}: it must be at least 1"])
    known: dict[str, Any] = {}
    if base is not None:
        run = resolve_config(_without_layout(base))
        w = workload_of(run)
        known = {name: getattr(w, name) for name in ("precision", "wire", "optimizer_states", "lora")}
        seq_length, global_batch = seq_length or w.seq_length, global_batch or run.global_batch_size
    shape = load_model_config(planner_model(model)) if model is not None else run.model
    return Request(
        model=shape,
        gpus=gpus,
        gpu=load_gpu(gpu),
        seq_length=seq_length or 4096,
        global_batch=global_batch or 1024,
        **known,
    )


def _without_layout(base: Mapping[str, Any]) -> dict[str, Any]:
    """The tree for one rank: its layout is what is looked for."""
    layout = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel")
    pipeline = ("pipeline_schedule", "pipeline_chunks", "pipeline_split")
    hybrid = {key: value for key, value in base.get("hybrid", {}).items() if key not in layout + pipeline}
    recompute = hybrid.get("recompute")
    if isinstance(recompute, Mapping):
        hybrid["recompute"] = {key: value for key, value in recompute.items() if key != "num_layers"}
    tree = {**base, "hybrid": hybrid}
    if isinstance(base.get("train_batch_size"), int):
        tree |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": "auto"}
    return tree


def enough_gpus(request: Request) -> tuple[Request, Candidate] | None:
    """The first doubling of the GPUs at which a layout fits, with the fastest there; None up to `MOST_GPUS`.

    The batch stays, so it bounds how many replicas there are to shard over.
    """
    while request.gpus * 2 <= MOST_GPUS:
        request = dataclasses.replace(request, gpus=request.gpus * 2)
        if feasible := search(request).feasible:
            return request, feasible[0]
    return None


def scaling(requests: Sequence[Request]) -> dict[str, list[tuple[Request, Candidate | None]]]:
    """The fastest layout of each number of GPUs: with one batch for all, and with a batch that grows with them."""
    first = requests[0]
    weak = [
        dataclasses.replace(request, global_batch=first.global_batch * request.gpus // first.gpus)
        for request in requests
    ]
    titles = {"strong scaling (one batch):": requests, "weak scaling (a batch that grows with the GPUs):": weak}
    answers = {}
    for title, asked in titles.items():
        answers[title] = [(request, next(iter(search(request).feasible), None)) for request in asked]
    return answers
