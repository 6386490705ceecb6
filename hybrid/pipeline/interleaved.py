"""The interleaved pipeline schedule as DeepSpeed's instructions (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

The model is cut into p v stages, of which rank r of p holds r, r + p, r + 2p, ...: its v chunks. A microbatch goes
round the ring of ranks v times. Since a stage is 1/v of what a rank does, the pipeline fills and drains in 1/v of the
time: the bubble is (p - 1) / (v m) of the work, where 1F1B's is (p - 1) / m.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.runtime.pipe import schedule

from hybrid.pipeline.rounds import Pass, Round, forward_passes, interleaved_rounds


class InterleavedSchedule(schedule.PipeSchedule):
    """What one rank does in a step.

    All ranks run their forwards in one order, and their backwards too (see rounds.py), so that what a rank sends to a
    neighbour arrives in the order in which it is needed. Between the rounds a rank exchanges what it has made for what
    it needs next: sends and receives are queued, and CommitP2P launches them and waits.

    Args:
        micro_batches: m; a multiple of `stages` unless `forward_only`.
        stages: p, the ranks of the pipeline.
        stage_id: r, this rank's place among them.
        chunks: v, the stages of a rank.
        forward_only: no backward passes and no step.
    """

    def __init__(
        self, micro_batches: int, stages: int, stage_id: int, *, chunks: int, forward_only: bool = False
    ) -> None:
        super().__init__(micro_batches, stages, stage_id)
        if micro_batches % stages and not forward_only:
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
        """The passes of this rank with the exchange before each, and the end of the step."""
        sends: list[schedule.PipeInstruction] = []
        for forward, backward in self._rounds():
            receives = self._receive_input(forward) + self._receive_gradient(backward)
            yield [*self._exchange(sends + receives), *self._load(forward), *self._compute(forward, backward)]
            sends = self._send_output(forward) + self._send_gradient(backward)
        end = (
            [] if self.forward_only else [schedule.ReduceTiedGrads(), schedule.ReduceGrads(), schedule.OptimizerStep()]
        )
        yield [*self._exchange(sends), *end]

    def _rounds(self) -> list[Round]:
        if self.forward_only:
            return [(one, None) for one in forward_passes(self.micro_batches, self.stages, self.chunks)]
        return interleaved_rounds(self.micro_batches, self.stages, self.stage_id, self.chunks)

    def _is_first(self, chunk: int) -> bool:
        return bool(self.is_first_stage) and chunk == 0

    def _is_last(self, chunk: int) -> bool:
        return bool(self.is_last_stage) and chunk == self.chunks - 1

    def _buffer(self, one: Pass) -> dict[str, int]:
        chunk, micro_batch = one
        return {"buffer_id": chunk * self.micro_batches + micro_batch}

    def _exchange(self, transfers: list[schedule.PipeInstruction]) -> list[schedule.PipeInstruction]:
        return [*transfers, schedule.CommitP2P()] if transfers else []

    def _receive_input(self, one: Pass | None) -> list[schedule.PipeInstruction]:
        return [] if one is None or self._is_first(one[0]) else [schedule.RecvActivation(**self._buffer(one))]

    def _send_output(self, one: Pass | None) -> list[schedule.PipeInstruction]:
        return [] if one is None or self._is_last(one[0]) else [schedule.SendActivation(**self._buffer(one))]

    def _receive_gradient(self, one: Pass | None) -> list[schedule.PipeInstruction]:
        return [] if one is None or self._is_last(one[0]) else [schedule.RecvGrad(**self._buffer(one))]

    def _send_gradient(self, one: Pass | None) -> list[schedule.PipeInstruction]:
        return [] if one is None or self._is_first(one[0]) else [schedule.SendGrad(**self._buffer(one))]

    def _load(self, one: Pass | None) -> list[schedule.PipeInstruction]:
        """Tokens for the first stage, labels for the last."""
        if one is None or not (self._is_first(one[0]) or self._is_last(one[0])):
            return []
        return [schedule.LoadMicroBatch(**self._buffer(one))]

    def _compute(self, forward: Pass | None, backward: Pass | None) -> list[schedule.PipeInstruction]:
        passes = []
        if forward is not None:
            passes.append(schedule.ForwardPass(**self._buffer(forward), chunk=forward[0]))
        if backward is not None:
            passes.append(schedule.BackwardPass(**self._buffer(backward), chunk=backward[0]))
        return passes
