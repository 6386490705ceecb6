"""Random states of a rank as JSON."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import numpy as np
import torch

from hybrid.tensor_parallel.random import RNGTracker


def rng_state(device: torch.device, tracker: RNGTracker | None) -> str:
    """All streams of this process: torch's, the device's, the tensor-parallel ones, numpy's and Python's."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": _encode(torch.get_rng_state()),
        "python": [version, list(words), gauss],
        "numpy": [name, [int(key) for key in keys], *rest],
        "streams": {} if tracker is None else {name: _encode(value) for name, value in tracker.state().items()},
    }
    if device.type == "cuda":
        state["cuda"] = _encode(torch.cuda.get_rng_state(device))
    return json.dumps(state)


def restore_rng_state(text: str, device: torch.device, tracker: RNGTracker | None) -> None:
    """Put every stream back to where `rng_state` found it."""
    state = json.loads(text)
    torch.set_rng_state(_decode(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_decode(state["cuda"]), device)
    if tracker is not None and state["streams"]:
        tracker.load_state({name: _decode(value) for name, value in state["streams"].items()})


def reseed(seed: int, step: int, rank: int, device: torch.device) -> RNGTracker:
    """Streams for a rank of another layout: a function of the step, so that no mask of the start is drawn again."""
    mixed = int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0]) >> 2
    torch.manual_seed(mixed)
    return RNGTracker.for_rank(mixed, rank, device)


def rng_file(rank: int) -> str:
    """The file of a checkpoint with a rank's states."""
    return f"rng-{rank:05d}.json"


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
