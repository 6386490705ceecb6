"""How long training stands still for a checkpoint, in the background and not: python -m benchmarks.checkpoint

One process holds weights, masters and moments of a model and saves them to --folder; only ratios are of use, and the
host memory that the copies take.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from hybrid.build import build_engine
from hybrid.checkpoint.checkpointer import Checkpointer
from hybrid.checkpoint.progress import progress_of
from hybrid.config.resolve import resolve_config
from hybrid.config.run import RunConfig
from hybrid.environment import init_distributed
from hybrid.grid import build_grid
from hybrid.optim.engine import HybridEngine

SAVES = 4


def configuration(parameters: float, folder: Path) -> dict[str, Any]:
    """A bf16 model of about so many parameters, most of them in its layers."""
    hidden, heads, layers = 1024, 16, max(1, round((parameters - 16e6) / (12 * 1024**2)))
    model = {
        "model_type": "llama",
        "vocab_size": 8192,
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3 // 64 * 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 64,
    }
    return {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "hybrid": {"model": model, "data": {"seq_length": 8}, "training": {"output_dir": str(folder)}},
    }


def stalls(engine: HybridEngine, checkpointer: Checkpointer, run: RunConfig) -> list[float]:
    """Seconds that each of some saves keeps the caller."""
    seconds = []
    for _ in range(SAVES):
        engine.global_steps += 1
        start = time.perf_counter()
        checkpointer.save(engine, progress_of(engine, run, 0, ""))
        seconds.append(time.perf_counter() - start)
        checkpointer.wait()  # as a run does that saves rarely: each finds the buffers free
    return seconds


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=500e6)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    device = init_distributed()
    result: dict[str, Any] = {}
    process = psutil.Process()
    tree = configuration(args.parameters, args.folder)
    base = resolve_config(tree, 1)
    grid = build_grid(base.parallel, base.model.num_key_value_heads)
    engine = build_engine(base, grid, device)
    engine.optimizer.inner.step()  # makes the moments
    before = process.memory_full_info().uss
    for name, asynchronous in (("sync", False), ("async", True)):
        run = resolve_config(
            {**tree, "hybrid": {**tree["hybrid"], "checkpoint": {"async": asynchronous, "keep_last": 1}}}, 1
        )
        checkpointer = Checkpointer(run, grid)
        result[name] = stalls(engine, checkpointer, run)
        result[f"{name}_extra_bytes"] = process.memory_full_info().uss - before
        checkpointer.finish()
        del checkpointer
    state = sum(path.stat().st_size for path in max(args.folder.glob("checkpoints/step-*")).glob("*.safetensors"))
    # The first save of a run also makes the buffer.
    later = [statistics.median(result[name][1:]) for name in ("async", "sync")]
    result |= {
        "state_bytes": state,
        "stall_ratio": later[0] / later[1],
        "first_stall_ratio": result["async"][0] / later[1],
    }
    result["extra_memory_of_the_state"] = result["async_extra_bytes"] / state
    print(json.dumps(result, indent=1))
    shutil.rmtree(args.folder / "checkpoints")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
