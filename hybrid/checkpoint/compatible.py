"""Whether a run may go on from a checkpoint: the model and the data must be the same, the layout need not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybrid.checkpoint.progress import Progress
from hybrid.config.errors import shown
from hybrid.config.model import LlamaConfig
from hybrid.config.run import RunConfig
from hybrid.convert.errors import CheckpointError

_MAY_DIFFER = {
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
    "max_position_embeddings",
    "pad_token_id",
}
"""Fields of a model that may change in the course of a run, the longest sequence unless RoPE is computed with it."""

_NOT_DATA = {"cache_dir"}
"""Fields of `hybrid.data` that do not decide which samples there are."""


def check_compatible(progress: Progress, run: RunConfig, data_fingerprint: str, where: str) -> None:
    """Compare what a checkpoint was made with and what the run is.

    Raises:
        CheckpointError: names every field that must not differ, with both values and the remedy.
    """
    section = progress.config["hybrid"]
    problems = [
        f"hybrid.model.{field} is {shown(theirs)} in the checkpoint, {shown(ours)} in this run: take the checkpoint's "
        "model, or start a run of its own (another --output_dir, or --resume none)"
        for field, theirs, ours in _model_differences(LlamaConfig.from_hf(section["model"]), run.model)
    ]
    problems += [
        f"{key} is {shown(theirs)} in the checkpoint, {shown(ours)} in this run, which is another model: take the "
        "checkpoint's adapters, or start from its weights with --init_from and --resume none, which merges them"
        for key, theirs, ours in _lora_differences(section.get("lora"), run.to_dict()["hybrid"]["lora"])
    ]
    theirs = progress.config["optimizer"]["type"]
    if _family(theirs) != _family(run.optimizer_type):
        problems.append(
            f"optimizer.type is {theirs} in the checkpoint, {run.optimizer_type} in this run, whose states are other "
            "ones: keep it, or start from the weights with --init_from"
        )
    if progress.data_fingerprint != data_fingerprint:
        before, now = _data_fields(section), _data_fields(run.to_dict()["hybrid"])
        changed = [
            f"hybrid.{field} is {shown(before.get(field))} in the checkpoint, {shown(now.get(field))} in this run"
            for field in sorted({**before, **now})
            if before.get(field) != now.get(field)
        ]
        reason = "; ".join(changed) or "hybrid.data.source has the same name, but not the same content"
        problems.append(
            f"the data are not those of the checkpoint, so that its position in them means nothing: {reason}. Give the "
            "same data, or start from the weights with --init_from and --resume none"
        )
    if problems:
        raise CheckpointError(problems, where)


def _model_differences(theirs: LlamaConfig, ours: LlamaConfig) -> Iterator[tuple[str, Any, Any]]:
    one, other = _flat(theirs.model_dump()), _flat(ours.model_dump())
    fixed = {"max_position_embeddings"} if ours.rope.reads_max_positions else set()
    for field in one:
        if field not in _MAY_DIFFER - fixed and one[field] != other[field]:
            yield field, one[field], other[field]


def _lora_differences(
    theirs: Mapping[str, Any] | None, ours: Mapping[str, Any] | None
) -> Iterator[tuple[str, Any, Any]]:
    """What adapters compute with; the states of a run with and of one without are those of other parameters."""
    if theirs is None or ours is None:
        if theirs is not ours:
            yield "hybrid.lora", theirs, ours
        return
    for field in ("r", "alpha"):
        if theirs[field] != ours[field]:
            yield f"hybrid.lora.{field}", theirs[field], ours[field]
    if set(theirs["targets"]) != set(ours["targets"]):
        yield "hybrid.lora.targets", theirs["targets"], ours["targets"]


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _family(optimizer_type: str) -> str:
    return "adam" if optimizer_type.lower() in ("adam", "adamw") else optimizer_type.lower()


def _data_fields(section: Mapping[str, Any]) -> dict[str, Any]:
    """What the data's fingerprint follows from, besides the data themselves."""
    fields = {f"data.{name}": value for name, value in section["data"].items() if name not in _NOT_DATA}
    return {**fields, "tokenizer": section["tokenizer"], "training.seed": section["training"]["seed"]}
