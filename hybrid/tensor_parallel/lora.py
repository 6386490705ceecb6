"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) on the layers cut over the tensor-parallel ranks.

Y = X W^T + s (drop(X) A^T) B^T with W frozen, A [r, in], B [out, r] and s = alpha / r. The matrix on the side that is
cut is cut like W, the other is held whole, and only the r-wide product in between is communicated.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid.config.parallel import Shard
from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from hybrid.tensor_parallel.mappings import (
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
)
from hybrid.tensor_parallel.params import ParamSpec, Segment, param_spec, replicated, set_spec
from hybrid.tensor_parallel.random import RNGTracker

_PEFT_PREFIX = "base_model.model."


Whole = Callable[[nn.Parameter], Tensor]
"""Gives this rank's A or B in fp32."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """What all adapters of a model have in common."""

    r: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    """Hugging Face names of projections, as `q_proj`."""

    @property
    def scale(self) -> float:
        """Factor on the adapter's output."""
        return self.alpha / self.r


def adapter_name(weight_name: str, matrix: str) -> str:
    """The key in a PEFT file of matrix `A` or `B` of the adapter on the weight `model.layers.0....q_proj.weight`."""
    return f"{_PEFT_PREFIX}{weight_name.removesuffix('.weight')}.lora_{matrix}.weight"


def is_adapter_name(hf_name: str) -> bool:
    """Whether a segment belongs to an adapter."""
    return hf_name.startswith(_PEFT_PREFIX)


def _projection(weight_name: str) -> str:
    return weight_name.removesuffix(".weight").rpartition(".")[2]


def _target(segment: Segment) -> str:
    return _projection(segment.hf_name)


class _Adapter(nn.Module):
    """A frozen layer and its adapter; `tp` is the layer's, with the random streams of dropout."""

    base: ColumnParallelLinear | RowParallelLinear
    lora_a: nn.Parameter
    lora_b: nn.Parameter

    def __init__(self, tp: TensorParallel, settings: LoraSettings) -> None:
        super().__init__()
        self.tp, self.settings = tp, settings

    def _empty(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=self.base.weight.dtype, device=self.base.weight.device))

    def _drop(self, x: Tensor, *, alike: bool) -> Tensor:
        """Dropout, with one mask on all tensor-parallel ranks where they hold the same `x`."""
        if not self.training or self.settings.dropout == 0:
            return x
        assert self.tp.rng is not None, "dropout draws from the tracker"
        with nullcontext() if alike else self.tp.rng.fork():
            return F.dropout(x, self.settings.dropout)

    def delta(self, segment: Segment, whole: Whole) -> Tensor | None:
        """s B A on this rank's slice of one of the base weight's segments, fp32; None if it has no adapter."""
        raise NotImplementedError


class ColumnParallelLora(_Adapter):
    """An adapter for each targeted projection of a fused column-parallel layer: A whole, B cut by rows.

    Forward: X A^T of the tokens at hand, for all projections at once, then an all-gather of it under sequence
    parallelism. Backward: the sum over ranks of its gradient, an all-reduce or reduce-scatter, r wide. The gradient of
    A is whole on every rank, but under sequence parallelism a part, of the shard's tokens.
    """

    base: ColumnParallelLinear

    def __init__(self, base: ColumnParallelLinear, settings: LoraSettings) -> None:
        super().__init__(base.tp, settings)
        self.base = base
        r, tp = settings.r, base.tp
        self._segments = param_spec(base.weight).segments
        targeted = [segment for segment in self._segments if _target(segment) in settings.targets]
        in_features = base.weight.size(1)
        whole = Shard(r, 0, r, replicas=tp.size, owner=tp.rank == 0)
        a, b, rows = [], [], 0
        self._places: dict[str, tuple[int, int]] = {}
        for number, segment in enumerate(targeted):
            name, shard = segment.hf_name, segment.shard
            self._places[name] = number * r, rows
            a.append(Segment(adapter_name(name, "A"), (r, in_features), 0, whole, number * r))
            b.append(Segment(adapter_name(name, "B"), (shard.size, r), 0, shard, rows, segment.partial))
            rows += shard.length
        self.lora_a, self.lora_b = self._empty(len(targeted) * r, in_features), self._empty(rows, r)
        set_spec(self.lora_a, ParamSpec(segments=tuple(a), sequence_partial=tp.sequence_sharded))
        set_spec(self.lora_b, ParamSpec(segments=tuple(b)))

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, in] (or [s/t, b, in]) to [s, b, rows]."""
        output: Tensor = self.base(x)
        sharded, group = self.tp.sequence_sharded, self.tp.group
        inner = F.linear(self._drop(x, alike=not sharded), self.lora_a)
        inner = gather_from_sequence_parallel(inner, group) if sharded else copy_to_tensor_parallel(inner, group)
        parts = [self._output(segment, inner) for segment in self._segments]
        return torch.add(output, torch.cat(parts, dim=-1), alpha=self.settings.scale)

    def _output(self, segment: Segment, inner: Tensor) -> Tensor:
        place, rows = self._places.get(segment.hf_name), segment.shard.length
        if place is None:
            return inner.new_zeros(*inner.shape[:-1], rows)
        first, row = place
        return F.linear(inner[..., first : first + self.settings.r], self.lora_b[row : row + rows])

    def delta(self, segment: Segment, whole: Whole) -> Tensor | None:
        place, rows = self._places.get(segment.hf_name), segment.shard.length
        if place is None:
            return None
        first, row = place
        a, b = whole(self.lora_a)[first : first + self.settings.r], whole(self.lora_b)[row : row + rows]
        return low_rank_product(b, a, self.settings.scale)


class RowParallelLora(_Adapter):
    """An adapter on a row-parallel layer: A cut by columns, B whole.

    Forward: the sum over ranks of X_r A_r^T, an all-reduce or reduce-scatter, r wide. Backward: nothing, or an
    all-gather under sequence parallelism, where the gradient of B is a part, of the shard's tokens.
    """

    base: RowParallelLinear

    def __init__(self, base: RowParallelLinear, settings: LoraSettings) -> None:
        super().__init__(base.tp, settings)
        self.base = base
        (segment,) = param_spec(base.weight).segments
        r, tp, out_features = settings.r, base.tp, base.weight.size(0)
        self.lora_a, self.lora_b = self._empty(r, segment.shard.length), self._empty(out_features, r)
        name_a, name_b = (adapter_name(segment.hf_name, matrix) for matrix in "AB")
        set_spec(self.lora_a, ParamSpec(segments=(Segment(name_a, (r, segment.shard.size), 1, segment.shard),)))
        whole = replicated(name_b, (out_features, r), tp.rank, tp.size)
        set_spec(self.lora_b, ParamSpec(segments=(whole,), sequence_partial=tp.sequence_sharded))

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, in/t] to [s, b, out] (or [s/t, b, out])."""
        output: Tensor = self.base(x)
        reduce = reduce_scatter_to_sequence_parallel if self.tp.sequence_sharded else reduce_from_tensor_parallel
        # Its features are cut over the ranks, so each draws another mask.
        inner = reduce(F.linear(self._drop(x, alike=False), self.lora_a), self.tp.group)
        return torch.add(output, F.linear(inner, self.lora_b), alpha=self.settings.scale)

    def delta(self, segment: Segment, whole: Whole) -> Tensor:
        return low_rank_product(whole(self.lora_b), whole(self.lora_a), self.settings.scale)


def attach_lora(module: nn.Module, settings: LoraSettings, *, seed: int, rng: RNGTracker | None = None) -> None:
    """Freeze `module` and put adapters on its targeted projections, A drawn from (`seed`, name), B zero.

    `rng` has the stream of this rank that dropout draws from; what all tensor-parallel ranks hold alike draws from the
    default stream, which must be alike on them.
    """
    module.requires_grad_(False)
    for parent, name, layer in list(_linears(module)):
        if any(_target(segment) in settings.targets for segment in param_spec(layer.weight).segments):
            layer.tp = replace(layer.tp, rng=rng)
            adapter: ColumnParallelLora | RowParallelLora
            if isinstance(layer, ColumnParallelLinear):
                adapter = ColumnParallelLora(layer, settings)
            else:
                adapter = RowParallelLora(layer, settings)
            _initialise(adapter, seed)
            setattr(parent, name, adapter)


def _linears(module: nn.Module) -> Iterator[tuple[nn.Module, str, ColumnParallelLinear | RowParallelLinear]]:
    for parent in module.modules():
        for name, child in parent.named_children():
            if isinstance(child, ColumnParallelLinear | RowParallelLinear):
                yield parent, name, child


@torch.no_grad()
def _initialise(adapter: _Adapter, seed: int) -> None:
    """As PEFT does it: A uniform within 1 / sqrt(in), B zero; A depends on the seed and its name alone."""
    adapter.lora_b.zero_()
    for segment in param_spec(adapter.lora_a).segments:
        digest = hashlib.blake2b(f"{seed}/{segment.hf_name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
        bound = 1 / math.sqrt(segment.hf_shape[1])
        full = torch.empty(segment.hf_shape).uniform_(-bound, bound, generator=generator)
        adapter.lora_a[segment.local] = full[segment.source].to(adapter.lora_a)


def model_adapter_shapes(
    weights: Mapping[str, tuple[int, ...]], r: int, targets: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """PEFT name to shape of all adapter matrices of a model whose weights have these names and shapes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in weights.items():
        if name.endswith(".weight") and _projection(name) in targets:
            shapes[adapter_name(name, "A")] = (r, shape[1])
            shapes[adapter_name(name, "B")] = (shape[0], r)
    return shapes


def low_rank_product(b: Tensor, a: Tensor, scale: float) -> Tensor:
    """`scale` B A of fp32 matrices B [m, r] and A [r, n], its r products added one after the other.

    A GEMM adds them in an order that depends on the shape and the device. In this one every element has the same bits
    in whatever slice it is computed, so that merged weights do not depend on who merges them.
    """
    total = b[:, :1] * a[:1]
    product = torch.empty_like(total)
    for k in range(1, a.size(0)):
        total += torch.mul(b[:, k : k + 1], a[k : k + 1], out=product)
    return total.mul_(scale)


def merged_values(module: nn.Module, whole: Whole) -> Callable[[nn.Parameter, Segment], Tensor]:
    """A function that gives this rank's slice of a segment with the adapter added in fp32, in the weight's dtype; the
    weights stay as they are."""
    adapters = {id(layer.base.weight): layer for layer in module.modules() if isinstance(layer, _Adapter)}

    @torch.no_grad()
    def value(param: nn.Parameter, segment: Segment) -> Tensor:
        slice_ = param.detach()[segment.local]
        adapter = adapters.get(id(param))
        delta = None if adapter is None else adapter.delta(segment, whole)
        return slice_ if delta is None else (slice_.float() + delta).to(slice_.dtype)

    return value
