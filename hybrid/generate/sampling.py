"""The next token from its logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen."""

    temperature: float = 0.0
    """0 takes the most likely token; otherwise logits are divided by it."""
    top_k: int = 0
    """Only the k most likely tokens; 0 for all."""
    top_p: float = 1.0
    """Only the most likely tokens that together have this probability (Holtzman et al. 2020)."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"temperature {self.temperature} and top_k {self.top_k} must be finite and not negative, and top_p "
                f"{self.top_p} lies above 0 and up to 1"
            )


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Token ids [b] from fp32 logits [b, V]."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits / sampling.temperature
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, logits.size(-1)), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, places = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        # The token that crosses the threshold stays, so that at least one does.
        beyond = probabilities.cumsum(dim=-1) - probabilities >= sampling.top_p
        logits = logits.masked_fill(beyond.scatter(-1, places, beyond), -torch.inf)
    probabilities = logits.softmax(dim=-1).cpu()
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1).to(logits.device)
