"""Changes to the configuration tree from the command line: named flags, and `--set PATH=JSON`."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from hybrid.config.deepspeed import known_paths
from hybrid.config.deepspeed_keys import REFUSED
from hybrid.config.errors import ConfigError, shown, unknown_key
from hybrid.config.model import HF_KEYS, read_model_json
from hybrid.config.training import hybrid_paths

FLAGS: dict[str, str] = {
    "train_steps": "hybrid.training.train_steps",
    "seq_length": "hybrid.data.seq_length",
    "model": "hybrid.model",
    "tokenizer": "hybrid.tokenizer",
    "data": "hybrid.data.source",
    "output_dir": "hybrid.training.output_dir",
    "seed": "hybrid.training.seed",
    "resume": "hybrid.training.resume",
    "init_from": "hybrid.init_from",
    "save_every": "hybrid.training.save_every",
    "keep_last": "hybrid.checkpoint.keep_last",
    "keep_every": "hybrid.checkpoint.keep_every",
    "stop_after_steps": "hybrid.training.stop_after_steps",
    "max_wall_time": "hybrid.training.max_wall_time",
    "eval_every": "hybrid.training.eval_every",
}
"""The named flags, and the path each one sets."""

FINETUNE_FLAGS: dict[str, str] = {
    "format": "hybrid.finetune.format",
    "eval_data": "hybrid.finetune.eval_data",
    "chat_template": "hybrid.finetune.chat_template",
    "train_on": "hybrid.finetune.train_on",
    "packing": "hybrid.finetune.packing",
    "too_long": "hybrid.finetune.too_long",
    "resize_vocab": "hybrid.finetune.resize_vocab",
}
"""Those of fine-tuning and evaluation besides."""

_OPEN_SECTIONS = (*REFUSED, "hybrid.model.rope_scaling", "hybrid.model.rope_parameters")
"""Sections of which any key may be set: what is wrong with it is said later, with the reason."""


def apply_override(tree: Mapping[str, Any], override: str) -> dict[str, Any]:
    """A copy of `tree` with `PATH=JSON` set; a value that is not JSON is taken as a string.

    Raises:
        ConfigError: there is no `=`, or no key at that path.
    """
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not path:
        raise ConfigError([f"--set {override} is not of the form PATH=JSON, as in bf16.enabled=false"])
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return set_path(tree, path, value)


def set_path(tree: Mapping[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy of `tree` with the value at a dotted path replaced, the sections on the way made if need be.

    Raises:
        ConfigError: no key has that path.
    """
    known = known_paths() | hybrid_paths() | {f"hybrid.model.{key}" for key in HF_KEYS} | {"hybrid"}
    if path not in known and not path.startswith(tuple(f"{section}." for section in _OPEN_SECTIONS)):
        raise ConfigError([unknown_key(path, known)])
    result = copy.deepcopy(dict(tree))
    section, names = result, path.split(".")
    for depth, name in enumerate(names[:-1], start=1):
        inner = _as_section(".".join(names[:depth]), section.get(name))
        section[name] = inner
        section = inner
    section[names[-1]] = value
    return result


def _as_section(path: str, value: object) -> dict[str, Any]:
    """The value at `path` as an object, where it stands in a short form or not at all."""
    if value is None and path != "hybrid.model":
        return {}
    if isinstance(value, dict):
        return value
    if path == "hybrid.model" and (value is None or isinstance(value, str)):
        return read_model_json("demo" if value is None else value)
    if path == "hybrid.recompute" and isinstance(value, str):
        return {"granularity": value}
    raise ConfigError([f"{path} is {shown(value)}: it must be an object"])
