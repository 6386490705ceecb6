"""What a run leaves to be used: the model, and of adapters both the merged model and the adapters themselves."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import torch.distributed as dist

from hybrid.agreement import from_rank_zero
from hybrid.checkpoint.adapter import export_adapter
from hybrid.checkpoint.export import export_hf
from hybrid.config.model import LlamaConfig
from hybrid.config.run import RunConfig
from hybrid.convert.files import write_json
from hybrid.data.build import DataModule
from hybrid.grid import Grid
from hybrid.optim.engine import HybridEngine
from hybrid.optim.state import whole_masters
from hybrid.tensor_parallel.lora import merged_values

logger = logging.getLogger(__name__)

ADAPTER = "adapter"
"""Name of the folder beside the merged model."""


def export_trained(
    engine: HybridEngine, grid: Grid, run: RunConfig, data: DataModule, directory: Path, *, best: bool = False
) -> None:
    """Write the weights as they are now; a collective call.

    The model goes to `directory`. Of adapters, the merged model does, and they themselves to `adapter` beside it, both
    made of the fp32 masters; of the `best` ones there is no merged model, since they are written often.
    """
    engine.optimizer.wait_parameters()
    save_tokenizer = data.tokenizer.save if data.tokenizer is not None else None
    lora, module, model = run.hybrid.lora, engine.module, stopping(run.model, data.end_ids)
    if lora is not None:
        adapter = directory if best else directory.with_name(ADAPTER)
        base = run.hybrid.init_from
        whole = whole_masters(engine.optimizer)
        export_adapter(module, whole, grid, model, lora, adapter, base=base, save_tokenizer=save_tokenizer)
        _say(adapter)
        if best:
            return
        export_hf(module, grid, model, directory, save_tokenizer, merged_values(module, whole))
    else:
        export_hf(module, grid, model, directory, save_tokenizer)
    _say(directory)


def _say(directory: Path) -> None:
    if dist.get_rank() == 0:
        logger.info("saved %s", directory)


def stopping(model: LlamaConfig, end_ids: tuple[int, ...]) -> LlamaConfig:
    """The model, which generation has to stop at the ends of turns it has learnt, besides its own end tokens.

    Args:
        end_ids: as `DataModule.end_ids`.
    """
    own = model.eos_token_id
    known = own if isinstance(own, list) else [] if own is None else [own]
    ends = list(dict.fromkeys([*end_ids, *known]))
    if set(ends) == set(known):
        return model
    return model.model_copy(update={"eos_token_id": ends[0] if len(ends) == 1 else ends})


class BestModel:
    """The lowest evaluation loss of a run so far, over all its launches."""

    def __init__(self, output: Path) -> None:
        self.directory = output / "best"
        self._record = output / "best.json"
        known: float | None = None
        if dist.get_rank() == 0 and self._record.exists() and self.directory.exists():
            known = float(json.loads(self._record.read_text(encoding="utf-8"))["eval_loss"])
        self._lowest = from_rank_zero(known)

    def improves(self, loss: float) -> bool:
        """Whether this loss, which is alike on every rank, is the lowest."""
        return math.isfinite(loss) and (self._lowest is None or loss < self._lowest)

    def record(self, step: int, loss: float) -> None:
        """Note the loss of the model that has just been written."""
        self._lowest = loss
        if dist.get_rank() == 0:
            write_json(self._record, {"step": step, "eval_loss": loss})
            logger.info("best so far: evaluation loss %.4f at step %d, in %s", loss, step, self.directory)
