"""A saver without a model: writes checkpoints of known content through the background writers of two ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from hybrid.checkpoint import directory
from hybrid.checkpoint.parts import Part
from hybrid.checkpoint.writer import BackgroundWriter, Job, Retention
from hybrid.convert.manifest import SHARDED, Layout, Manifest

RANKS = 2
ROWS, COLUMNS = 64, 500

MANIFEST = Manifest(
    format=SHARDED,
    layout=Layout(tensor_model_parallel_size=1, layers_per_stage=(1,)),
    vocab_size=ROWS * RANKS,
    padded_vocab_size=ROWS * RANKS,
    dtype="float32",
    files={},
)


class Saver:
    """Both ranks' writers in one process."""

    def __init__(self, root: Path, keep_last: int = 0) -> None:
        self.root = root
        retention = Retention(keep_last=keep_last)
        self.writers = [BackgroundWriter(root, rank, RANKS, retention) for rank in range(RANKS)]

    def submit(self, step: int) -> list[Job]:
        """Begin to write the checkpoint of a step; its tensor holds the step everywhere."""
        staging = directory.begin(self.root, step)
        jobs = []
        for rank, writer in enumerate(self.writers):
            buffer = writer.buffers.take()
            data = torch.full((ROWS * COLUMNS,), float(step))
            part = Part(key="embedding", offset=(rank * ROWS, 0), shape=(ROWS, COLUMNS), data=data, file=0)
            job = Job(
                step=step, staging=staging, name=f"model-{rank}", buffer=buffer, parts=buffer.copy([part]), rng="{}"
            )
            job.manifest = replace(MANIFEST) if rank == 0 else None
            jobs.append(job)
        for writer, job in zip(self.writers, jobs, strict=True):
            writer.submit(job)
        return jobs

    def save(self, step: int) -> list[Job]:
        """As `submit`, and wait."""
        jobs = self.submit(step)
        for job in jobs:
            assert job.finished.wait(60)
        return jobs
