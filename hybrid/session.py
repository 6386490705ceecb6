"""One launch on one rank: the process group, the watch over the others, the run, and how its failures are told."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from hybrid.agreement import RemoteError, fail, rank_zero_only, refuse
from hybrid.config.run import RunConfig
from hybrid.convert.errors import CheckpointError
from hybrid.environment import connections_in_words, init_distributed, set_up_logging
from hybrid.run_folder import held
from hybrid.signals import StopSignals
from hybrid.trainer import OpenData, Trainer, open_text_data
from hybrid.watchdog import start_watchdog

logger = logging.getLogger(__name__)

_VERDICT_SECONDS = 2.0
_LINGER_SECONDS = 60.0


def run_training(run: RunConfig, open_data: OpenData = open_text_data, *, keep_best: bool = False) -> int:
    """Start the process group, train, and end it; what the launch scripts call.

    Args:
        open_data, keep_best: as `Trainer`.

    Returns:
        The exit code, as `Trainer.train`, or EXIT_REFUSED or EXIT_FAILED of `hybrid.agreement`.
    """
    with StopSignals() as signals, ExitStack() as until_the_end:
        device = init_distributed()
        set_up_logging(dist.get_rank())
        if device.type == "cuda" and run.parallel.tensor_model_parallel_size > 1:
            logger.info("%s", connections_in_words())
        watchdog = start_watchdog()
        trainer = None
        try:
            rank_zero_only(lambda: until_the_end.enter_context(held(Path(run.hybrid.training.output_dir))))
            trainer = Trainer(run, device, signals, open_data, keep_best=keep_best)
            code = trainer.train()
        except Exception as error:
            # A peer that died is seen as a lost connection somewhere; the watchdog knows whose.
            lost = isinstance(error, RuntimeError) and not isinstance(error, RemoteError)
            if watchdog is not None and lost and (verdict := watchdog.verdict(_VERDICT_SECONDS)):
                error.add_note(verdict)
            elif trainer is not None:
                trainer.checkpointer.linger(_LINGER_SECONDS)
            if trainer is not None and isinstance(error, CheckpointError):
                code = fail(error)
            elif trainer is not None or not isinstance(error, (ValueError, OSError, RemoteError)):
                raise
            else:
                code = refuse(error)
        if watchdog is not None:
            watchdog.close()
    dist.destroy_process_group()
    return code
