"""Who takes part in each layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.alone import Step, hugging_face_loop
from benchmarks.deepspeed_zero import zero
from benchmarks.package import build_engine, package_step
from benchmarks.stubs import collectives_stubbed
from benchmarks.torch_ddp import ddp
from benchmarks.workload import Share, Workload


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A way to spread the work over `ranks` processes, and those who do it."""

    ranks: int
    share: Share
    """What the ideal does."""
    package: dict[str, Callable[..., object]]
    """Builders of this package's engine."""
    peers: dict[str, Callable[[Workload], Step]]


HUGGING_FACE = "Hugging Face model alone"
STUBBED = ", collectives stubbed"
BF16_WIRE = " bf16 wire"
PACKAGE = "hybrid"


def _package(**options: object) -> dict[str, Callable[..., object]]:
    return {PACKAGE: partial(build_engine, **options)}  # type: ignore[arg-type]


def _sharded(stage: int) -> dict[str, Callable[..., object]]:
    return {
        PACKAGE: partial(build_engine, stage=stage),
        PACKAGE + BF16_WIRE: partial(build_engine, stage=stage, wire=torch.bfloat16),
    }


def _alone(workload: Workload) -> Step:
    return hugging_face_loop(workload.share("data"))


LAYOUTS: dict[str, Layout] = {
    "single": Layout(ranks=1, share="whole", package=_package(), peers={HUGGING_FACE: hugging_face_loop}),
    "dp2": Layout(
        ranks=2,
        share="data",
        package=_sharded(1),
        peers={"DeepSpeed ZeRO-1": partial(zero, stage=1), "torch DDP": ddp, HUGGING_FACE: _alone},
    ),
    "dp2-z2": Layout(ranks=2, share="data", package=_sharded(2), peers={"DeepSpeed ZeRO-2": partial(zero, stage=2)}),
    "tp2": Layout(ranks=2, share="tensor", package=_package(tp=2), peers={}),
    "tp2-sp": Layout(ranks=2, share="tensor", package=_package(tp=2, sequence_parallel=True), peers={}),
    "pp2": Layout(ranks=2, share="pipe", package=_package(pp=2), peers={}),
}


def steps(name: str, workload: Workload) -> Iterator[tuple[str, Step]]:
    """The contestants of a layout, this package's also with stubbed collectives where that means something."""
    layout = LAYOUTS[name]
    for who, build in layout.package.items():
        step = package_step(build(workload), workload)  # type: ignore[arg-type]
        yield who, step
        if layout.ranks > 1 and layout.share != "pipe":  # without its transfers a pipeline has no order
            yield who + STUBBED, partial(_stubbed, step)
    for who, build_peer in layout.peers.items():
        yield who, build_peer(workload)


def _stubbed(step: Step) -> None:
    with collectives_stubbed():
        step()
