"""torch's tensor parallelism (DTensor) over the Hugging Face model, its loss over the sharded vocabulary."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.alone import MasterWeights, Step, accumulate, hugging_face_model
from benchmarks.workload import Batch, Workload


class ShardedMasterWeights(MasterWeights):
    """Master copies of the local shards; their arithmetic then costs no dispatch of DTensors."""

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def local_grad(self, param: nn.Parameter) -> torch.Tensor:
        grad = super().local_grad(param)
        if not isinstance(grad, DTensor):
            return grad
        assert isinstance(param, DTensor)
        # A norm's gradient may be a partial sum until it is asked for.
        whole: DTensor = grad.redistribute(placements=param.placements)
        return whole.to_local()

    def norm(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        sharded = [isinstance(p, DTensor) and any(place.is_shard() for place in p.placements) for p in self._params]
        parts = [[g for g, cut in zip(grads, sharded, strict=True) if cut == kind] for kind in (True, False)]
        mine, alike = (nn.utils.get_total_norm(part, foreach=True) ** 2 for part in parts)
        dist.all_reduce(mine)
        return (mine + alike).sqrt()


def _outer(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Embedding and head; the last norm stands between them."""
    hidden = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden),
        "lm_head": ColwiseParallel(input_layouts=hidden, output_layouts=Shard(-1), use_local_output=False),
    }
    return {**plan, "model.norm": SequenceParallel()} if sequence_parallel else plan


def _layer(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    hidden = Shard(1) if sequence_parallel else Replicate()
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel(output_layouts=hidden) for name in ("self_attn.o_proj", "mlp.down_proj")}
    if sequence_parallel:  # one gather for the three, or two, projections of an input
        shards: dict[str, Placement] = {"hidden_states": Shard(1)}
        whole: dict[str, Placement] = {"hidden_states": Replicate()}
        plan |= {
            "input_layernorm": SequenceParallel(),
            "post_attention_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts=shards, desired_input_kwarg_layouts=whole, use_local_output=True
            ),
            "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True),
        }
    return plan


def dtensor(workload: Workload, sequence_parallel: bool) -> Step:
    """The plan of torch's tutorial on tensor parallelism, with `loss_parallel`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = hugging_face_model(workload)
    parallelize_module(model, mesh, _outer(sequence_parallel))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, _layer(sequence_parallel))
    weights = ShardedMasterWeights(list(model.parameters()))
    batches = workload.batches(workload.sequences, seed=0)
    # The model would count positions on a shard of the sequence.
    positions = torch.arange(workload.seq_length).unsqueeze(0)

    def loss(batch: Batch) -> torch.Tensor:
        ids, labels = batch
        logits = model(input_ids=ids, position_ids=positions).logits
        mean = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return mean.to_local() if isinstance(mean, DTensor) else mean

    def around(last: bool) -> contextlib.AbstractContextManager[object]:
        return loss_parallel()

    def step() -> torch.Tensor:
        mean = accumulate(loss, batches, around)
        weights.step()
        return mean

    return step
