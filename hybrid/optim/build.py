"""torch optimizers by the names DeepSpeed's configuration uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hybrid.optim.lion import Lion

ParamGroups = list[dict[str, Any]]
MakeOptimizer = Callable[[ParamGroups], torch.optim.Optimizer]


def optimizer_factory(name: str, params: Mapping[str, Any]) -> MakeOptimizer:
    """A constructor for the elementwise optimizer `name` (Adam, AdamW, SGD, Lion; any case).

    `params` are those of `optimizer.params`. As in DeepSpeed, Adam means AdamW unless `adam_w_mode` is false.
    """
    options = dict(params)
    key = name.lower()
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    decoupled = options.pop("adam_w_mode", True)
    if key in ("adam", "adamw"):
        kind: type[torch.optim.Optimizer] = torch.optim.AdamW if key == "adamw" or decoupled else torch.optim.Adam
        options["fused"] = True
    elif key == "sgd":
        kind = torch.optim.SGD
        options["fused"] = True
    else:
        assert key == "lion", "the configuration accepts no other optimizer"
        kind = Lion
    return lambda groups: kind(groups, **options)
