"""Every layout of a model over a number of GPUs: what fits, how fast it should be, and why the rest does not fit."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hybrid.config.layout import balanced_split, tensor_parallel_sizes
from hybrid.config.model import LlamaConfig
from hybrid.config.parallel import ParallelConfig
from hybrid.config.run import Precision
from hybrid.config.training import LoraConfig
from hybrid.planner.estimate import PLAIN, Estimate, Practice, estimate
from hybrid.planner.hardware import Gpu
from hybrid.planner.memory import RankMemory, fullest_stage
from hybrid.planner.workload import Recompute, Workload

RESERVE_GIB = 5.0
"""Of a device, for the CUDA context, NCCL's buffers, cuBLAS workspaces and what the allocator cannot use."""

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
_MICRO_BATCHES = (1, 2, 4, 8, 16)
_CHUNKS = 2
"""Stages a rank holds in the interleaved layouts that are tried, the default of `hybrid.pipeline_chunks`."""


@dataclass(frozen=True)
class Candidate:
    """A layout, the memory of its fullest rank, and its speed."""

    workload: Workload
    stage: int
    """The pipeline stage that needs most memory."""
    memory: RankMemory
    gpu: Gpu
    practice: Practice = PLAIN

    @property
    def available(self) -> float:
        """Bytes a rank may use."""
        return (self.gpu.memory_gib - RESERVE_GIB) * 2**30

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.available

    @functools.cached_property
    def estimate(self) -> Estimate:
        """Time and rates; computed when asked for, since most layouts do not fit."""
        return estimate(self.workload, self.gpu, self.practice)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for."""

    model: LlamaConfig
    gpus: int
    gpu: Gpu
    seq_length: int
    global_batch: int
    """Samples per step."""
    precision: Precision = "bf16"
    optimizer_states: int = 2
    wire: Precision = "fp32"
    lora: LoraConfig | None = None


@dataclass(frozen=True)
class Found:
    """The answer."""

    feasible: list[Candidate]
    """Fastest first."""
    too_large: list[Candidate]
    """What does not fit into memory, least excess first."""
    excluded: dict[str, int]
    """Reasons that rule layouts out before their memory is computed, with the number of layouts."""


def evaluate(w: Workload, gpu: Gpu, practice: Practice = PLAIN) -> Candidate:
    """Memory and speed of one workload."""
    stage, memory = fullest_stage(w)
    return Candidate(w, stage, memory, gpu, practice)


def variants(
    w: Workload, gpu: Gpu, kinds: Sequence[Recompute] = RECOMPUTE, practice: Practice = PLAIN
) -> Iterator[Candidate]:
    """The layout of `w` under stage 1, then 2, and ever more recomputation, until more of it can only be slower."""
    for recompute in kinds:
        candidate = evaluate(dataclasses.replace(w, recompute=recompute, zero_stage=1), gpu, practice)
        yield candidate
        if candidate.fits:
            return
        if w.d > 1:
            sharded = dataclasses.replace(w, recompute=recompute, zero_stage=2, gradient_sharding="microbatch")
            yield evaluate(sharded, gpu, practice)


def layouts(request: Request, excluded: Counter[str]) -> Iterator[Workload]:
    """Every grid and microbatch size the model and the batch allow; what is ruled out is counted by reason."""
    model, gpus = request.model, request.gpus
    for t in (n for n in range(1, gpus + 1) if gpus % n == 0):
        if t not in tensor_parallel_sizes(model):
            excluded[f"TP {t} does not divide heads, key/value heads and MLP of the model"] += 1
            continue
        if t > request.gpu.gpus_per_node:
            excluded[f"TP {t} is more than the {request.gpu.gpus_per_node} GPUs of a node"] += 1
            continue
        if request.seq_length % t:
            excluded[f"sequences of {request.seq_length} tokens cannot be cut over TP {t}"] += 1
            continue
        for p in (n for n in range(1, gpus // t + 1) if gpus // t % n == 0):
            if p > model.num_hidden_layers:
                excluded[f"PP {p} is more than the {model.num_hidden_layers} layers"] += 1
                continue
            yield from _with_batches(request, t, p, excluded)


def _with_batches(request: Request, t: int, p: int, excluded: Counter[str]) -> Iterator[Workload]:
    d = request.gpus // (t * p)
    if request.global_batch % d:
        excluded[f"a global batch of {request.global_batch} cannot be cut over DP {d}"] += 1
        return
    splits = [balanced_split(request.model, p * chunks, request.seq_length) for chunks in _chunks(request.model, p)]
    for size, split in itertools.product(_MICRO_BATCHES, splits):
        if request.global_batch // d % size:
            continue
        if len(split) > p and request.global_batch // (d * size) % p:
            continue  # the interleaved schedule takes microbatches in groups of p
        yield Workload(
            model=request.model,
            parallel=ParallelConfig(
                tensor_model_parallel_size=t,
                pipeline_model_parallel_size=p,
                data_parallel_size=d,
                sequence_parallel=t > 1,
            ),
            layers_per_stage=split,
            seq_length=request.seq_length,
            micro_batch_size=size,
            micro_batches=request.global_batch // (d * size),
            precision=request.precision,
            bucket_size=max(40_000_000, 1_000_000 * d),
            wire=request.wire,
            optimizer_states=request.optimizer_states,
            lora=request.lora,
        )


def _chunks(model: LlamaConfig, p: int) -> tuple[int, ...]:
    """Stages a pipeline rank may hold: one (1F1B), and two (interleaved) where the layers divide."""
    return (1, _CHUNKS) if p > 1 and model.num_hidden_layers % (p * _CHUNKS) == 0 else (1,)


def search(request: Request) -> Found:
    """All layouts, ranked."""
    excluded: Counter[str] = Counter()
    feasible: list[Candidate] = []
    too_large: list[Candidate] = []
    for w in layouts(request, excluded):
        tried = list(variants(w, request.gpu))
        fitting = [candidate for candidate in tried if candidate.fits]
        if fitting:
            feasible += fitting
        else:
            too_large.append(min(tried, key=lambda candidate: candidate.memory.total))
    feasible.sort(key=lambda candidate: -candidate.estimate.tokens_per_second)
    too_large.sort(key=lambda candidate: candidate.memory.total)
    return Found(feasible, too_large, dict(excluded))
