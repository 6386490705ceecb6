"""The engine for several stages on a rank: the interleaved schedule, and transfers around the ring of ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule

from hybrid.grid import group_of
from hybrid.optim.engine import HybridEngine
from hybrid.pipeline.interleaved import InterleavedSchedule


class InterleavedEngine(HybridEngine):
    """A HybridEngine whose module has several chunks; `train_batch` and `evaluate` are used alike.

    Activations and gradients travel in groups of their own: of two ranks each is before and behind the other, and NCCL
    tells the messages of a group apart by their order alone.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        grid = self._hybrid_grid
        pipelines = grid.topology.get_axis_comm_lists("pipe")
        self._queues: dict[Any, list[dist.P2POp]] = {grid.pipe_group: [], group_of(grid.rank, pipelines): []}
        self._activations, self._gradients = self._queues
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self.pipe_buffers["gradients"] = []

    def _train_schedule(self) -> InterleavedSchedule:
        self._start_step()
        return self._schedule(self.micro_batches, forward_only=False)

    def _inference_schedule(self, micro_batches: int) -> InterleavedSchedule:
        return self._schedule(micro_batches, forward_only=True)

    def _schedule(self, micro_batches: int, *, forward_only: bool) -> InterleavedSchedule:
        return InterleavedSchedule(
            micro_batches, self.num_stages, self.stage_id, chunks=len(self.module.chunks), forward_only=forward_only
        )

    def _neighbour(self, step: int) -> int:
        """The pipeline rank so many further around the ring."""
        return int((self.stage_id + step) % self.num_stages)

    def _queue(self, operation: Any, tensors: tuple[torch.Tensor, ...], step: int, group: Any) -> None:
        peer = self.grid.stage_to_global(self._neighbour(step))
        self._queues[group] += [dist.P2POp(operation, tensor, peer, group) for tensor in tensors]

    def _exec_commit_p2p(self) -> None:
        """Launch what is queued, and wait until it has arrived."""
        works = [work for queue in self._queues.values() if queue for work in dist.batch_isend_irecv(queue)]
        for work in works:
            work.wait()
        for queue in self._queues.values():
            queue.clear()

    def _exec_forward_pass(self, buffer_id: int, chunk: int = 0) -> None:
        super()._exec_forward_pass(buffer_id, chunk)
        if not torch.is_grad_enabled():
            self.pipe_buffers["inputs"][buffer_id] = None

    def _output_gradient(self, buffer_id: int) -> torch.Tensor:
        gradient: torch.Tensor = self.pipe_buffers["gradients"][buffer_id]
        self.pipe_buffers["gradients"][buffer_id] = None
        return gradient

    def _agree_on_shapes(self, mine: list[tuple[torch.Size, torch.dtype]]) -> None:
        """Take the first stage's: what goes from stage to stage is alike. The first communication of every rank."""
        found = [mine]
        dist.broadcast_object_list(found, src=self.grid.stage_to_global(0), group=self._activations)
        self._shapes = found[0]

    def _exec_send_activations(self, buffer_id: int) -> None:
        outputs = self.pipe_buffers["outputs"][buffer_id]
        if not self._shapes:
            self._agree_on_shapes([(tensor.shape, tensor.dtype) for tensor in _tensors(outputs)])
        self._queue(dist.isend, _tensors(outputs), 1, self._activations)
        if not torch.is_grad_enabled():
            self.pipe_buffers["outputs"][buffer_id] = None

    def _exec_recv_activations(self, buffer_id: int) -> None:
        if not self._shapes:
            self._agree_on_shapes([])
        tensors = tuple(
            torch.empty(shape, dtype=dtype, device=self.device, requires_grad=dtype.is_floating_point)
            for shape, dtype in self._shapes
        )
        self._queue(dist.irecv, tensors, -1, self._activations)
        self.pipe_buffers["inputs"][buffer_id] = tensors if len(tensors) > 1 else tensors[0]

    def _exec_send_grads(self, buffer_id: int) -> None:
        hidden = _tensors(self.pipe_buffers["inputs"][buffer_id])[0]
        assert hidden.grad is not None
        self._queue(dist.isend, (hidden.grad,), -1, self._gradients)
        self.pipe_buffers["inputs"][buffer_id] = None

    def _exec_recv_grads(self, buffer_id: int) -> None:
        gradient = torch.empty_like(_tensors(self.pipe_buffers["outputs"][buffer_id])[0])
        self._queue(dist.irecv, (gradient,), 1, self._gradients)
        self.pipe_buffers["gradients"][buffer_id] = gradient

    _INSTRUCTION_MAP = {
        **HybridEngine._INSTRUCTION_MAP,
        schedule.ForwardPass: _exec_forward_pass,
        schedule.SendActivation: _exec_send_activations,
        schedule.RecvActivation: _exec_recv_activations,
        schedule.SendGrad: _exec_send_grads,
        schedule.RecvGrad: _exec_recv_grads,
        schedule.CommitP2P: _exec_commit_p2p,
    }


def _tensors(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The hidden states, and the segment numbers that travel beside them."""
    return outputs if isinstance(outputs, tuple) else (outputs,)
