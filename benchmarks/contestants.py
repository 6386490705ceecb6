"""Who takes part in each layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from benchmarks.alone import Step, hugging_face_loop
from benchmarks.deepspeed_autotp import autotp
from benchmarks.deepspeed_pipeline import BALANCED_SPLIT, DEFAULT_SPLIT, pipeline
from benchmarks.deepspeed_zero import zero
from benchmarks.measure import Started, start
from benchmarks.package import build_engine, package_step
from benchmarks.stubs import collectives_stubbed
from benchmarks.torch_ddp import ddp
from benchmarks.torch_dtensor import dtensor
from benchmarks.torch_fsdp2 import fsdp2
from benchmarks.workload import Share, Workload

Build = Callable[[Workload], Step]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A way to spread the work over `ranks` processes, and those who do it."""

    ranks: int
    share: Share
    """What the ideal does."""
    package: dict[str, Build]
    """This package's engine."""
    peers: dict[str, Build] = field(default_factory=dict)
    """Those that train the same model on the same data."""
    alone: dict[str, Build] = field(default_factory=dict)
    """Those that do their share of the work without the others."""


HUGGING_FACE = "Hugging Face model alone"
STUBBED = ", collectives stubbed"
BF16_WIRE = " bf16 wire"
INTERLEAVED = ", two stages a rank"
PACKAGE = "hybrid"


def _package(workload: Workload, **options: object) -> Step:
    return package_step(build_engine(workload, **options), workload)  # type: ignore[arg-type]


def _sharded(stage: int) -> dict[str, Build]:
    return {
        PACKAGE: partial(_package, stage=stage),
        PACKAGE + BF16_WIRE: partial(_package, stage=stage, wire=torch.bfloat16),
    }


def _alone(workload: Workload) -> Step:
    return hugging_face_loop(workload.share("data"))


LAYOUTS: dict[str, Layout] = {
    "single": Layout(ranks=1, share="whole", package={PACKAGE: _package}, peers={HUGGING_FACE: hugging_face_loop}),
    "dp2": Layout(
        ranks=2,
        share="data",
        package=_sharded(1),
        peers={"DeepSpeed ZeRO-1": partial(zero, stage=1), "torch FSDP2": fsdp2, "torch DDP": ddp},
        alone={HUGGING_FACE: _alone},
    ),
    "dp2-z2": Layout(ranks=2, share="data", package=_sharded(2), peers={"DeepSpeed ZeRO-2": partial(zero, stage=2)}),
    "tp2": Layout(
        ranks=2,
        share="tensor",
        package={PACKAGE: partial(_package, tp=2)},
        peers={"torch DTensor": partial(dtensor, sequence_parallel=False), "DeepSpeed AutoTP": autotp},
    ),
    "tp2-sp": Layout(
        ranks=2,
        share="tensor",
        package={PACKAGE: partial(_package, tp=2, sequence_parallel=True)},
        peers={"torch DTensor": partial(dtensor, sequence_parallel=True)},
    ),
    "pp2": Layout(
        ranks=2,
        share="pipe",
        package={PACKAGE: partial(_package, pp=2), PACKAGE + INTERLEAVED: partial(_package, pp=2, interleaved=True)},
        peers={
            "DeepSpeed PipelineModule, balanced split": partial(pipeline, split=BALANCED_SPLIT),
            "DeepSpeed PipelineModule, default split": partial(pipeline, split=DEFAULT_SPLIT),
        },
    ),
}


def started(name: str, workload: Workload) -> Iterator[tuple[str, Started | str]]:
    """The contestants of a layout, this package's also with stubbed collectives; or why one cannot run."""
    layout = LAYOUTS[name]
    for who, build in {**layout.package, **layout.peers, **layout.alone}.items():
        found = start(partial(build, workload))
        yield who, found
        if who in layout.package and layout.ranks > 1 and isinstance(found, Started):
            yield who + STUBBED, Started(partial(_stubbed, found.step), ())


def comparable(name: str, who: str) -> bool:
    """Whether the losses of this contestant's first steps have to be this package's."""
    return who in LAYOUTS[name].package or who in LAYOUTS[name].peers


def _stubbed(step: Step) -> torch.Tensor:
    with collectives_stubbed():
        return step()
