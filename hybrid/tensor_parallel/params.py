"""What a parameter is: which Hugging Face tensors it holds, and how it is cut over the tensor-parallel ranks.

The only module that attaches anything to a parameter. Conversion, initialisation, the optimizer and checkpoints read
the mapping from here and do slicing only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hybrid.config.parallel import Shard

_ATTRIBUTE = "_hybrid_spec"
_SINK = "_hybrid_gradient_sink"

GradientSink = Callable[[torch.Tensor, torch.Tensor], bool]
"""Takes a gradient as the two factors of a matrix product, to sum it where it belongs; false, and nothing done, if it
cannot."""


@dataclass(frozen=True)
class Segment:
    """One Hugging Face tensor's slice inside a parameter: `param[local] == hf_tensor[source]`.

    Both are cut along `dim`. `shard` says which indices of the Hugging Face tensor this rank holds (never padding);
    `offset` says where they start in the parameter.
    """

    hf_name: str
    hf_shape: tuple[int, ...]
    dim: int
    shard: Shard
    offset: int = 0
    partial: bool = False
    """Each replica sees only a part of the gradient: key/value heads that feed other query heads on every rank."""

    def _index(self, start: int, stop: int) -> tuple[slice, ...]:
        return (slice(None),) * self.dim + (slice(start, stop),)

    @property
    def source(self) -> tuple[slice, ...]:
        """Index into the Hugging Face tensor."""
        return self._index(self.shard.start, self.shard.stop)

    @property
    def local(self) -> tuple[slice, ...]:
        """Index into the parameter."""
        return self._index(self.offset, self.offset + self.shard.length)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        return (*self.hf_shape[: self.dim], self.shard.length, *self.hf_shape[self.dim + 1 :])


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """Everything the rest of the package needs to know about one parameter.

    Rows of the parameter that no segment covers are padding: zero, and not part of the model.
    """

    segments: tuple[Segment, ...]
    decay: bool = True
    """Weight decay applies (matrices), or not (norms and biases)."""
    sequence_partial: bool = False
    """Held whole by every tensor-parallel rank, while each rank's gradient covers only its shard of the sequence."""
    tied: bool = False
    """Also held by another pipeline stage, where it gets another part of its gradient."""


def set_spec(param: nn.Parameter, spec: ParamSpec) -> None:
    """Attach `spec` to a freshly made parameter."""
    setattr(param, _ATTRIBUTE, spec)


def param_spec(param: torch.Tensor) -> ParamSpec:
    """The spec of a parameter of this package's layers."""
    spec = getattr(param, _ATTRIBUTE, None)
    assert isinstance(spec, ParamSpec), "every parameter of the model is made with a ParamSpec"
    return spec


def set_gradient_sink(param: nn.Parameter, sink: GradientSink) -> None:
    """Say where the gradient of a weight goes if a layer has it as a product; autograd then gets none."""
    setattr(param, _SINK, sink)


def gradient_sink(param: torch.Tensor) -> GradientSink | None:
    """What `set_gradient_sink` said."""
    sink: GradientSink | None = getattr(param, _SINK, None)
    return sink


def replicated(hf_name: str, shape: Sequence[int], tp_rank: int, tp_size: int) -> Segment:
    """The segment of a tensor that every tensor-parallel rank holds whole."""
    shard = Shard(shape[0], 0, shape[0], replicas=tp_size, owner=tp_rank == 0)
    return Segment(hf_name, tuple(shape), 0, shard)


def named_segments(module: nn.Module) -> Iterator[tuple[nn.Parameter, Segment]]:
    """Every (parameter, segment) of a module, shared parameters once, in registration order."""
    for param in module.parameters():
        for segment in param_spec(param).segments:
            yield param, segment
