"""An operator's forward and backward as plain functions, which torch.compile can fuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Formulas:
    """What an autograd function of an operator calls; neither keeps anything, and backward may write over its input."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]

    def compiled(self) -> Formulas:
        """The same, each a kernel of Inductor's once it has been called."""
        return Formulas(torch.compile(self.forward), torch.compile(self.backward))
