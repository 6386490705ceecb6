"""1F1B, over several stages a rank interleaved, as DeepSpeed's instructions (Narayanan et al. 2021, arXiv:2104.04473).

The model is cut into p v stages, of which rank r of p holds r, r + p, r + 2p, ...: its v chunks. A microbatch goes
round the ring of ranks v times. Since a stage is 1/v of what a rank does, the pipeline fills and drains in 1/v of the
time: the bubble is (p - 1) / (v m) of the work, with one chunk a rank, 1F1B's, (p - 1) / m (section 2.2).
"""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.runtime.pipe import schedule

from hybrid.pipeline.rounds import Pass, Round, forward_passes, pipeline_rounds


class PassSchedule(schedule.PipeSchedule):
    """What one rank does in a step.

    All ranks run their forwards in one order, and their backwards too (see rounds.py), so that what a rank sends to a
    neighbour arrives in the order in which it is needed. What a pass needs is received directly before it, what it made
    is sent directly after it. Sends must not wait for their receivers, as DeepSpeed's own schedules let them.

    Args:
        micro_batches: m; with several chunks a multiple of `stages` unless `forward_only`.
        stages: p, the ranks of the pipeline.
        stage_id: r, this rank's place among them.
        chunks: v, the stages of a rank.
        forward_only: no backward passes and no step.
    """

    def __init__(
        self, micro_batches: int, stages: int, stage_id: int, *, chunks: int = 1, forward_only: bool = False
    ) -> None:
        super().__init__(micro_batches, stages, stage_id)
        if chunks > 1 and micro_batches % stages and not forward_only:
            raise ValueError(
                f"the interleaved schedule takes microbatches in groups of {stages}, one for each pipeline rank: "
                f"{micro_batches} is no multiple of it"
            )
        self.chunks = chunks
        self.forward_only = forward_only

    def num_pipe_buffers(self) -> int:
        """A slot for every chunk of every microbatch: `chunk * micro_batches + microbatch`."""
        return int(self.chunks * self.micro_batches)

    def steps(self) -> Iterator[list[schedule.PipeInstruction]]:
        """The passes of this rank, each between its receive and its send, and the end of the step."""
        for forward, backward in self._rounds():
            yield [*self._forward(forward), *self._backward(backward)]
        if not self.forward_only:
            yield [schedule.ReduceTiedGrads(), schedule.ReduceGrads(), schedule.OptimizerStep()]

    def _rounds(self) -> list[Round]:
        if self.forward_only:
            return [(one, None) for one in forward_passes(self.micro_batches, self.stages, self.chunks)]
        return pipeline_rounds(self.micro_batches, self.stages, self.stage_id, self.chunks)

    def _slot(self, one: Pass) -> int:
        chunk, micro_batch = one
        return int(chunk * self.micro_batches + micro_batch)

    def _ends(self, chunk: int) -> tuple[bool, bool]:
        """Whether a chunk of this rank is the model's first stage, and whether its last."""
        return bool(self.is_first_stage) and chunk == 0, bool(self.is_last_stage) and chunk == self.chunks - 1

    def _forward(self, one: Pass | None) -> list[schedule.PipeInstruction]:
        """A forward with what it takes, tokens in the first stage and labels in the last, and where its output goes."""
        if one is None:
            return []
        slot, (first, last) = self._slot(one), self._ends(one[0])
        receive = [] if first else [schedule.RecvActivation(slot)]
        load = [schedule.LoadMicroBatch(slot)] if first or last else []
        send = [] if last else [schedule.SendActivation(slot)]
        return [*receive, *load, schedule.ForwardPass(slot, chunk=one[0]), *send]

    def _backward(self, one: Pass | None) -> list[schedule.PipeInstruction]:
        """A backward with the gradient it takes, and where the one it makes goes."""
        if one is None:
            return []
        slot, (first, last) = self._slot(one), self._ends(one[0])
        receive = [] if last else [schedule.RecvGrad(slot)]
        send = [] if first else [schedule.SendGrad(slot)]
        return [*receive, schedule.BackwardPass(slot, chunk=one[0]), *send]
