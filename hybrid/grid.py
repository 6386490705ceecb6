"""The process grid: ranks to (pipe, data, tensor) coordinates, and the process groups along each axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from hybrid.config.parallel import ParallelConfig, kv_replicas
from hybrid.environment import DEFAULT_TIMEOUT

Group = dist.ProcessGroup | None
"""A process group, or None where the axis has one rank: then nothing is communicated."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """This rank's place in the grid, with the groups it belongs to.

    Ranks are numbered as DeepSpeed's topology does it, tensor innermost, then data, then pipe:
    at TP 2, DP 2, PP 2, rank 5 is pipe 1, data 0, tensor 1.
    """

    parallel: ParallelConfig
    topology: PipeModelDataParallelTopology
    rank: int
    pipe_rank: int
    data_rank: int
    tensor_rank: int
    tensor_group: Group
    data_group: Group
    pipe_group: Group
    embedding_group: Group
    """First and last stage of this pipeline, for tied embeddings; None on other stages."""
    kv_group: Group
    """Tensor-parallel ranks that hold the same key/value heads."""

    @property
    def world_size(self) -> int:
        return self.parallel.world_size

    @property
    def is_first_stage(self) -> bool:
        return self.pipe_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipe_rank == self.parallel.pipeline_model_parallel_size - 1


def group_of(rank: int, rank_lists: Iterable[Sequence[int]]) -> Group:
    """Make a group for each list (all ranks take part in each call) and return the one that holds `rank`."""
    mine: Group = None
    for ranks in rank_lists:
        if len(ranks) == 1:
            continue
        group = dist.new_group(ranks=list(ranks), timeout=DEFAULT_TIMEOUT)  # not NCCL's own, which is shorter
        if rank in ranks:
            mine = group
    return mine


def build_grid(parallel: ParallelConfig, num_key_value_heads: int) -> Grid:
    """The grid of the running world; a collective call.

    Raises:
        ValueError: the world does not have `parallel.world_size` ranks.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if world_size != parallel.world_size:
        raise ValueError(
            f"the world has {world_size} ranks, but tensor {parallel.tensor_model_parallel_size} x pipeline "
            f"{parallel.pipeline_model_parallel_size} x data {parallel.data_parallel_size} needs {parallel.world_size}"
        )
    topology = PipeModelDataParallelTopology(
        num_pp=parallel.pipeline_model_parallel_size,
        num_mp=parallel.tensor_model_parallel_size,
        num_dp=parallel.data_parallel_size,
    )
    coordinate = topology.get_coord(rank)
    tensor_lists = topology.get_axis_comm_lists("model")
    pipe_lists = topology.get_axis_comm_lists("pipe")
    replicas = kv_replicas(num_key_value_heads, parallel.tensor_model_parallel_size)
    kv_lists = [ranks[i : i + replicas] for ranks in tensor_lists for i in range(0, len(ranks), replicas)]
    return Grid(
        parallel=parallel,
        topology=topology,
        rank=rank,
        pipe_rank=coordinate.pipe,
        data_rank=coordinate.data,
        tensor_rank=coordinate.model,
        tensor_group=group_of(rank, tensor_lists),
        data_group=group_of(rank, topology.get_axis_comm_lists("data")),
        pipe_group=group_of(rank, pipe_lists),
        embedding_group=group_of(rank, [sorted({ranks[0], ranks[-1]}) for ranks in pipe_lists]),
        kv_group=group_of(rank, kv_lists),
    )
