"""DeepSpeed's pipeline engine with ZeRO 0, 1 or 2 at any depth, several stages a rank, and transfers that run ahead."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from hybrid.agreement import everyone
from hybrid.grid import Grid
from hybrid.optim.build import MakeOptimizer
from hybrid.optim.distributed import BrokenStep, DistributedOptimizer
from hybrid.optim.reading import Batch, Reader
from hybrid.optim.settings import OptimizerSettings
from hybrid.pipeline.module import LlamaPipeline
from hybrid.pipeline.schedule import PassSchedule
from hybrid.pipeline.transfers import Form, Transfers

MakeScheduler = Callable[[torch.optim.Optimizer], Any]


class HybridEngine(PipelineEngine):
    """Runs a schedule of DeepSpeed's instructions; owns forward, backward, transfers, reduction, step and loss.

    DeepSpeed is told stage 1 and nothing of the dtype: it refuses more than stage 1 under a pipeline, and fp16 on some
    CPUs, while here parameters, gradients and their reduction are the distributed optimizer's.

    Args:
        module: this rank's stage.
        grid: this rank's place.
        ds_config: what DeepSpeed reads: batch sizes, monitors.
        settings: of the distributed optimizer.
        make_optimizer: builds the torch optimizer over this rank's fp32 pieces.
        make_scheduler: builds the learning-rate scheduler over that.
    """

    module: LlamaPipeline
    optimizer: DistributedOptimizer
    pipe_buffers: dict[str, list[Any]]

    def __init__(
        self,
        module: LlamaPipeline,
        grid: Grid,
        ds_config: dict[str, Any],
        settings: OptimizerSettings,
        make_optimizer: MakeOptimizer,
        make_scheduler: MakeScheduler,
    ) -> None:
        self._hybrid_grid = grid
        self._settings = settings
        self._backwards = [0] * len(module.chunks)
        self._eval_totals: torch.Tensor | None = None
        super().__init__(
            args=None,
            model=module,
            optimizer=make_optimizer,
            lr_scheduler=make_scheduler,
            mpu=module.mpu(),
            config=ds_config,
            config_class=DeepSpeedConfig(ds_config, module.mpu()),
        )
        # They serve engine.forward(), which a pipeline does not use, and cost time in every microbatch.
        self.module_forward_pre_hook.remove()
        self.module_forward_post_hook.remove()
        self.pipe_buffers["gradients"] = []
        # As small as a sequence can be that is cut over the tensor-parallel ranks.
        blank = torch.zeros(self.micro_batch_size, grid.parallel.tensor_model_parallel_size, dtype=torch.int64)
        self._reader = Reader((blank, torch.full_like(blank, -100)), one_shape=self.num_stages > 1)
        self._transfers: Transfers | None = None
        self._forms: list[Form] = []
        if self.num_stages > 1:
            self._transfers = Transfers(grid, self.device, ring=len(module.chunks) > 1)

    def _configure_optimizer(self, client_optimizer: MakeOptimizer, model_parameters: Any) -> None:
        self._refuse_nothing_to_train()
        layers, chunks = self.module.parameters_by_layer(), self.module.chunks
        self.optimizer = DistributedOptimizer(layers, self._hybrid_grid, self._settings, client_optimizer, chunks)
        self.basic_optimizer = self.optimizer.inner
        self.module.before_layer = self.optimizer.before_layer

    def _refuse_nothing_to_train(self) -> None:
        """One stage may be frozen, not all: every rank learns of it, since the others would wait for one that stops."""
        trainable = torch.tensor(any(p.requires_grad for p in self.module.parameters()), dtype=torch.int32)
        trainable = trainable.to(self.device)
        if self._hybrid_grid.world_size > 1:
            dist.all_reduce(trainable)
        if not trainable:
            raise ValueError("no parameter of the model requires a gradient: leave at least one trainable")

    def train_batch(self, data_iter: Iterator[Batch] | None = None) -> torch.Tensor:
        """Train on the microbatches of a step; its loss, on every rank.

        Raises:
            ValueError: the data end within the step, or change their shape under a pipeline; the same on every rank,
                and nothing is updated.
        """
        try:
            loss: torch.Tensor = super().train_batch(data_iter)
        except BrokenStep:
            if self._transfers is not None:
                self._transfers.finish()
            raise self._fault() from None
        return loss

    def _fault(self) -> ValueError:
        """What the ranks read; a collective call."""
        faults, self._reader.fault = everyone(self._reader.fault), None
        found = [(rank, fault) for rank, fault in enumerate(faults) if fault is not None]
        return ValueError(f"rank {found[0][0]}: {found[0][1]}")

    def _train_schedule(self) -> PassSchedule:
        self._backwards = [0] * len(self.module.chunks)
        return self._schedule(self.micro_batches, forward_only=False)

    def _inference_schedule(self, micro_batches: int) -> PassSchedule:
        return self._schedule(micro_batches, forward_only=True)

    def _schedule(self, micro_batches: int, *, forward_only: bool) -> PassSchedule:
        chunks = len(self.module.chunks)
        return PassSchedule(micro_batches, self.num_stages, self.stage_id, chunks=chunks, forward_only=forward_only)

    def _exec_schedule(self, pipe_schedule: schedule.PipeSchedule) -> None:
        if self._transfers is None:
            super()._exec_schedule(pipe_schedule)
            return
        counts = Counter(type(instruction) for step in pipe_schedule for instruction in step)
        self._transfers.expect({"activations": counts[schedule.RecvActivation], "gradients": counts[schedule.RecvGrad]})
        super()._exec_schedule(pipe_schedule)
        self._transfers.finish()

    def _makes_loss(self, chunk: int) -> bool:
        """Whether the loss follows this stage of the rank."""
        return bool(self.is_last_stage()) and chunk == len(self.module.chunks) - 1

    def _next_batch(self) -> tuple[Any, torch.Tensor]:
        """(what the first stage takes, labels) of the next microbatch."""
        tokens, labels, *packing = self._reader.take(self.data_iterator)
        if self._reader.fault is not None and self._eval_totals is None:
            self.optimizer.break_off()
        if not packing:
            return tokens, labels
        _, segments = packing
        return (tokens, segments.int()), labels

    def _exec_forward_pass(self, buffer_id: int, chunk: int = 0) -> None:
        outputs = self.module(self.pipe_buffers["inputs"][buffer_id], chunk)
        if self._makes_loss(chunk):
            loss_sum, tokens = self.module.loss_fn(outputs, self.pipe_buffers["labels"][buffer_id])
            outputs = loss_sum
            self.pipe_buffers["labels"][buffer_id] = None
            if self._eval_totals is not None:
                self._eval_totals += torch.stack([loss_sum.double(), tokens.double()])
            elif self._hybrid_grid.tensor_rank == 0:
                self.optimizer.add_loss(loss_sum, tokens)
        self.pipe_buffers["outputs"][buffer_id] = outputs
        if not torch.is_grad_enabled():
            self.pipe_buffers["inputs"][buffer_id] = None

    def _exec_backward_pass(self, buffer_id: int, chunk: int = 0) -> None:
        self._backwards[chunk] += 1
        outputs = self.pipe_buffers["outputs"][buffer_id]
        if self._makes_loss(chunk):
            grad = torch.full_like(outputs, self.optimizer.backward_scale)
        else:
            grad, self.pipe_buffers["gradients"][buffer_id] = self.pipe_buffers["gradients"][buffer_id], None
            if isinstance(outputs, tuple):  # segment numbers beside the hidden states have no gradient
                outputs = outputs[0]
        self.optimizer.begin_microbatch(last=self._backwards[chunk] == self.micro_batches, chunk=chunk)
        if outputs.requires_grad:  # not of a frozen first stage
            torch.autograd.backward(outputs, grad)
        self.optimizer.end_microbatch()
        self.pipe_buffers["outputs"][buffer_id] = None
        if self.is_first_stage() and chunk == 0:
            self.pipe_buffers["inputs"][buffer_id] = None

    def _agree_on_forms(self, mine: list[Form]) -> None:
        """Take the first stage's: what goes from stage to stage is alike. The first communication of every rank."""
        found = [mine]
        dist.broadcast_object_list(found, src=self.grid.stage_to_global(0), group=self._hybrid_grid.pipe_group)
        self._forms = found[0]

    def _exec_send_activations(self, buffer_id: int) -> None:
        assert self._transfers is not None
        outputs = _tensors(self.pipe_buffers["outputs"][buffer_id])
        if not self._forms:
            self._agree_on_forms([(tensor.shape, tensor.dtype) for tensor in outputs])
        self._transfers.send("activations", outputs)
        if not torch.is_grad_enabled():
            self.pipe_buffers["outputs"][buffer_id] = None

    def _exec_recv_activations(self, buffer_id: int) -> None:
        assert self._transfers is not None
        if not self._forms:
            self._agree_on_forms([])
        tensors = self._transfers.receive("activations", self._forms)
        tensors[0].requires_grad_()
        self.pipe_buffers["inputs"][buffer_id] = tensors if len(tensors) > 1 else tensors[0]

    def _exec_send_grads(self, buffer_id: int) -> None:
        assert self._transfers is not None
        hidden = _tensors(self.pipe_buffers["inputs"][buffer_id])[0]
        assert hidden.grad is not None
        self._transfers.send("gradients", [hidden.grad])
        self.pipe_buffers["inputs"][buffer_id] = None

    def _exec_recv_grads(self, buffer_id: int) -> None:
        assert self._transfers is not None
        (self.pipe_buffers["gradients"][buffer_id],) = self._transfers.receive("gradients", self._forms[:1])

    def _exec_reduce_tied_grads(self) -> None:
        """Nothing: tied gradients are summed on the reduced shards, in `finish_gradients`."""

    def _exec_reduce_grads(self) -> None:
        self.optimizer.finish_gradients()

    def _aggregate_total_loss(self) -> torch.Tensor:
        """The step's loss, which the optimizer's one all-reduce has brought to every rank."""
        assert self.optimizer.result is not None
        return torch.tensor(self.optimizer.result.loss)

    def evaluate(self, batches: Iterator[Batch], num_micro_batches: int) -> tuple[float, int]:
        """(mean loss, supervised tokens) over `num_micro_batches` of every data-parallel rank; alike on every rank.

        Unlike DeepSpeed's eval_batch, a token counts the same in whatever microbatch it lies.

        Raises:
            ValueError: as `train_batch`.
        """
        training_batches = self.data_iterator
        self._eval_totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.module.eval()
        self.set_dataiterator(batches)
        with torch.no_grad():
            self._exec_schedule(self._inference_schedule(num_micro_batches))
        totals, self._eval_totals = self._eval_totals, None
        self.set_dataiterator(training_batches)
        self.module.train()
        self.pipe_buffers = {key: [None] * len(value) for key, value in self.pipe_buffers.items()}
        if self._hybrid_grid.tensor_rank != 0:
            totals.zero_()
        if self._reader.fault is not None:
            totals.fill_(math.nan)  # also of the sum over the ranks
        if self._hybrid_grid.world_size > 1:
            dist.all_reduce(totals)
        loss_sum, tokens = totals.tolist()
        if math.isnan(tokens):
            raise self._fault()
        return loss_sum / max(tokens, 1), int(tokens)

    # The engine looks its methods up here, not by name.
    _INSTRUCTION_MAP = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.ForwardPass: _exec_forward_pass,
        schedule.BackwardPass: _exec_backward_pass,
        schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
        schedule.ReduceGrads: _exec_reduce_grads,
        schedule.SendActivation: _exec_send_activations,
        schedule.RecvActivation: _exec_recv_activations,
        schedule.SendGrad: _exec_send_grads,
        schedule.RecvGrad: _exec_recv_grads,
    }


def _tensors(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The hidden states, and the segment numbers that travel beside them."""
    return outputs if isinstance(outputs, tuple) else (outputs,)
