"""The distributed optimizer: gradients reduced to shards, the step taken on fp32 shards, the weights gathered back.

The order of things is Megatron-LM's: backward fills contiguous buckets that are reduced over the data-parallel ranks
while it goes on; the optimizer updates this rank's fp32 shard; the shard is written back into the parameters' buckets
and gathered, each bucket waited for by the first layer of the next forward that needs it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybrid.grid import Grid
from hybrid.optim.build import MakeOptimizer
from hybrid.optim.gradients import GradientBuckets
from hybrid.optim.layout import build_layout
from hybrid.optim.loss_scaler import LossScaler
from hybrid.optim.microbatch_gradients import MicrobatchGradients
from hybrid.optim.parameters import ParameterBuckets
from hybrid.optim.replicas import ReplicaGradients
from hybrid.optim.settings import NUM_FLAGS, OptimizerSettings, StepResult
from hybrid.optim.step_gradients import StepGradients
from hybrid.tensor_parallel.params import param_spec

logger = logging.getLogger(__name__)


class BrokenStep(RuntimeError):
    """A rank could not do its part of the step: nothing was updated."""


class DistributedOptimizer:
    """ZeRO stage 0, 1 or 2 for one pipeline stage's parameters.

    Args:
        layers: (name, parameter) pairs by pipeline layer, in forward order; a shared parameter at its first use.
            Parameters that do not require gradients stay as they are and cost nothing.
        grid: this rank's place and groups.
        settings: stage, bucket size, clipping, ...
        make_optimizer: builds the elementwise torch optimizer over this rank's fp32 pieces.
        chunks: the layers that one backward goes through, where that is not all of them; they share no bucket.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[tuple[str, nn.Parameter]]],
        grid: Grid,
        settings: OptimizerSettings,
        make_optimizer: MakeOptimizer,
        chunks: Sequence[range] = (),
    ) -> None:
        self.settings = settings
        self._grid = grid
        # Backward makes the gradients of the last layer first: that is the order in which buckets fill.
        self.params = [p for layer in reversed(layers) for _, p in reversed(layer) if p.requires_grad]
        self.frozen_nbytes = sum(p.nbytes for layer in layers for _, p in layer if not p.requires_grad)
        # Of the first parameter, frozen or not: a stage may have nothing to train.
        self._device, self.dtype = layers[0][0][1].device, layers[0][0][1].dtype
        sharded = settings.stage > 0 and grid.data_group is not None
        shard = grid.data_rank if sharded else 0
        # A tied embedding shares its bucket with nothing, so that its shards lie alike on the first and last stage.
        self.layout = build_layout(
            [param.numel() for param in self.params],
            bucket_size=settings.bucket_size,
            num_shards=grid.parallel.data_parallel_size if sharded else 1,
            alone=frozenset(i for i, param in enumerate(self.params) if param_spec(param).tied),
            first=self._last_parameters(layers, chunks),
        )
        self.pieces = self.layout.pieces(shard)
        self.parameters = ParameterBuckets(self.params, self.layout, grid.data_group if sharded else None, shard)
        self.gradients = self._make_gradients(shard)
        self._layer_buckets = self._buckets_by_layer(layers)
        self._chunk_buckets = [self._span(chunk) for chunk in chunks or [range(len(layers))]]
        self.masters = self._make_masters()
        self.inner = make_optimizer(self._groups())
        self._replicas = ReplicaGradients(
            self.params,
            self.pieces,
            [self.gradients.view(piece) for piece in self.pieces],
            grid,
            counts_norm=sharded or grid.data_rank == 0,
        )
        self.scaler = LossScaler(settings.fp16) if settings.fp16 is not None else None
        self._loss = torch.zeros(2, dtype=torch.float64, device=self._device)
        self._raised = (False,) * NUM_FLAGS
        self._flags = torch.zeros(NUM_FLAGS, dtype=torch.float64, device=self._device)
        self._versions = [param._version for param in self.params]
        self.skips = 0
        self.result: StepResult | None = None

    def _make_gradients(self, shard: int) -> GradientBuckets:
        settings, group = self.settings, self._grid.data_group
        if settings.stage == 2 and settings.gradient_sharding == "microbatch" and group is not None:
            return MicrobatchGradients(self.params, self.layout, group, shard, wire=settings.wire_dtype)
        return StepGradients(
            self.params, self.layout, group, shard, wire=settings.wire_dtype, all_reduce=settings.stage == 0
        )

    def _buckets_by_layer(self, layers: Sequence[Sequence[tuple[str, nn.Parameter]]]) -> list[list[int]]:
        bucket_of = {
            id(self.params[item.index]): bucket.index for bucket in self.layout.buckets for item in bucket.placements
        }
        return [sorted({bucket_of[id(p)] for _, p in layer if id(p) in bucket_of}, reverse=True) for layer in layers]

    def _last_parameters(
        self, layers: Sequence[Sequence[tuple[str, nn.Parameter]]], chunks: Sequence[range]
    ) -> frozenset[int]:
        """Indices of the parameters with which the chunks' backwards begin."""
        place = {id(param): index for index, param in enumerate(self.params)}
        held = [[place[id(p)] for i in chunk for _, p in layers[i] if id(p) in place] for chunk in chunks]
        return frozenset(min(indices) for indices in held if indices)

    def _span(self, chunk: range) -> range:
        """The buckets of a chunk's layers: neighbours, since it shares none."""
        buckets = [bucket for layer in chunk for bucket in self._layer_buckets[layer]]
        return range(min(buckets), max(buckets) + 1) if buckets else range(0)

    def _make_masters(self) -> list[nn.Parameter]:
        """This rank's fp32 pieces; of an fp32 model they are the parameters themselves."""
        masters = []
        for piece in self.pieces:
            master = nn.Parameter(self.parameters.view(piece).float())
            master.grad = self.gradients.view(piece)
            masters.append(master)
        return masters

    def _groups(self) -> list[dict[str, Any]]:
        decayed: list[nn.Parameter] = []
        plain: list[nn.Parameter] = []
        for piece, master in zip(self.pieces, self.masters, strict=True):
            (decayed if param_spec(self.params[piece.index]).decay else plain).append(master)
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
        # A rank can own nothing of a small model; torch wants a parameter, so it gets an empty one.
        return [group for group in groups if group["params"]] or [{"params": [nn.Parameter(torch.zeros(0))]}]

    # What the pipeline engine calls, in the order of a step.

    @property
    def backward_scale(self) -> float:
        """What a microbatch's summed loss is multiplied by before its backward."""
        return self.loss_scale / self.settings.nominal_tokens

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale if self.scaler is not None else 1.0

    def begin_microbatch(self, last: bool, chunk: int = 0) -> None:
        """Before a microbatch's backward through a chunk of the layers; `last`: of the step, through this chunk."""
        self.gradients.begin_microbatch(last, self._chunk_buckets[chunk])

    def end_microbatch(self) -> None:
        """After a microbatch's backward."""
        self.gradients.end_microbatch()

    def add_loss(self, loss_sum: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count a microbatch's summed loss and supervised tokens; one tensor-parallel rank of the last stage does."""
        self._loss += torch.stack([loss_sum.detach().double(), tokens.double()])

    def raise_flags(self, flags: Sequence[bool]) -> None:
        """Say in the coming steps that this rank raises these; the steps' results tell every rank."""
        if tuple(flags) != self._raised:
            self._raised = tuple(flags)
            self._flags.copy_(torch.tensor(flags, dtype=torch.float64))

    def break_off(self) -> None:
        """Let this step end in a `BrokenStep` on every rank."""
        self._loss.fill_(math.nan)  # also of the sum over the ranks, where a number of tokens is always finite

    def finish_gradients(self) -> None:
        """Wait for the data-parallel reduction, then add up what replicas hold in parts."""
        self.gradients.finish()
        self._replicas.reduce()

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights, or skip on every rank alike if any rank's gradient is not finite.

        Raises:
            RuntimeError: too many skips in a row, or fp16 overflow at the minimum loss scale; on every rank.
            BrokenStep: after `break_off` on any rank; on every rank.
        """
        self.refresh_changed()
        norm_and_flag = self._replicas.local_norm(self._device)
        totals = torch.cat([norm_and_flag, self._loss, self._flags])
        if self._grid.world_size > 1:
            dist.all_reduce(totals)
        square_sum, bad_ranks, loss_sum, tokens, *raised = totals.tolist()
        if math.isnan(tokens):
            raise BrokenStep
        flags = tuple(count > 0 for count in raised)
        if bad_ranks or not tokens:
            self._skip(loss_sum, int(tokens), flags)
            return
        scale = self.settings.nominal_tokens / (tokens * self.loss_scale)
        grad_norm = square_sum**0.5 * scale
        limit = self.settings.gradient_clipping
        factor = scale * min(1.0, limit / (grad_norm + 1e-6)) if limit else scale
        if self.pieces and factor != 1.0:
            torch._foreach_mul_([self.gradients.view(piece) for piece in self.pieces], factor)
        self.inner.step()
        self.write_back()
        self.result = StepResult(loss_sum / tokens, int(tokens), grad_norm, skipped=False, flags=flags)
        self.skips = 0
        if self.scaler is not None:
            self.scaler.update(overflow=False)

    def _skip(self, loss_sum: float, tokens: int, raised: tuple[bool, ...]) -> None:
        if tokens:
            flags = torch.zeros(self._grid.world_size, device=self._device)
            flags[self._grid.rank] = not self.gradients.made_finite()
            if self._grid.world_size > 1:
                dist.all_reduce(flags)
            ranks = flags.nonzero().flatten().tolist()
            # Large finite parts can have a sum that is not.
            reason = "the gradient is not finite" + (f" on rank(s) {ranks}" if ranks else " once summed over the ranks")
        else:
            reason = "the global batch has no supervised token"
        self.skips += 1
        self.result = StepResult(loss_sum / tokens if tokens else 0.0, tokens, float("nan"), True, reason, raised)
        if self.skips >= self.settings.max_skipped_steps:
            raise RuntimeError(
                f"{self.skips} steps in a row were skipped (hybrid.training.max_skipped_steps): {reason}; "
                "lower the learning rate, or look for bad data or a bad initial checkpoint"
            )
        if tokens and self.scaler is not None:
            self.scaler.update(overflow=True)

    def write_back(self) -> None:
        """Bring the masters' values into the parameters of every rank."""
        if self.masters and self.masters[0].dtype != self.params[0].dtype:
            views = [self.parameters.view(piece) for piece in self.pieces]
            torch._foreach_copy_(views, [master.detach() for master in self.masters])
        self.parameters.gather()
        if not self.settings.overlap:
            self.parameters.wait_all()

    def zero_grad(self) -> None:
        """Forget the step's gradients and loss."""
        self.gradients.reset()
        self._loss.zero_()

    def before_layer(self, layer: int) -> None:
        """Wait for the weights of a pipeline layer (an index into `layers`)."""
        self.parameters.wait(self._layer_buckets[layer])

    def wait_parameters(self) -> None:
        """Wait until all parameters hold the last step's weights."""
        self.parameters.wait_all()

    # Weights that change outside a step.

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take the masters from the parameters; call after weights were loaded into the model."""
        for piece, master in zip(self.pieces, self.masters, strict=True):
            master.copy_(self.parameters.view(piece))
        self.keep_masters()

    def keep_masters(self) -> None:
        """The masters hold what the parameters do: changes made so far need not be taken over."""
        self._versions = [param._version for param in self.params]

    def refresh_changed(self) -> None:
        """Take over in-place changes of parameters, which autograd's version counters show."""
        if self._versions != [param._version for param in self.params]:
            self.refresh_masters()

    # What DeepSpeed's engine reads.

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state

    @property
    def overflow(self) -> bool:
        return self.result is not None and self.result.skipped

    @property
    def _global_grad_norm(self) -> float:
        return self.result.grad_norm if self.result is not None else 0.0
