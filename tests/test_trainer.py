"""Who reads the data, and that all ranks agree on the position in them."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.pool import WorkerPool
from support.runs import make_trainer, tree, write_tokens

from hybrid.config.resolve import resolve_config
from hybrid.data.samples import GPTDataset
from hybrid.evaluation import Request, evaluate

RAMP = {"start": 2, "increment": 2, "samples": 12}


def configuration(folder: Path, tokens: str, pp: int, **changes: Any) -> dict[str, Any]:
    """Packed documents, a growing batch, evaluations, a checkpoint after two of five steps."""
    config = tree(
        folder, tokens, (1, pp, 1, 1), train_steps=5, batch_rampup=RAMP, eval_every=2, eval_fraction=0.2,
        train_micro_batch_size_per_gpu=1, **changes,
    )  # fmt: skip
    config["hybrid"]["data"]["reset_attention"] = True
    return config


def reading(configs: list[dict[str, Any]]) -> tuple[int, list[Any]]:
    """Train with each configuration, then evaluate by the last: rows read on this rank, and the evaluation's result."""
    rows, read = [], GPTDataset.read

    def watched(self: GPTDataset, position: int) -> Any:
        rows.append(position)
        return read(self, position)

    GPTDataset.read = watched  # type: ignore[method-assign]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            for config in configs:
                trainer = make_trainer(config)
                assert trainer.train() == 0
            run = resolve_config(configs[-1], dist.get_world_size())
            found = evaluate(run, Request(loss=True), torch.device("cpu"))
    finally:
        GPTDataset.read = read  # type: ignore[method-assign]
    return len(rows), [found["loss"], found["tokens"], trainer._samples_consumed]


def lines(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(row["step"], row.get("loss", row.get("eval_loss"))) for row in map(json.loads, (folder / name).open())]


def test_stages_between_first_and_last_read_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    """Through a growing batch, evaluations and a resumption; and the run is that of one rank."""
    tokens = write_tokens(tmp_path)
    parts = [configuration(tmp_path / "stages", tokens, 4, **stop) for stop in ({"stop_after_steps": 2}, {})]
    results = pool.run(reading, 4, parts)
    ((_, alone),) = pool.run(reading, 1, [configuration(tmp_path / "alone", tokens, 1)])
    assert [count > 0 for count, _ in results] == [True, False, False, True]
    assert alone[2] == 2 + 2 + 4 + 6 + 8
    for _, found in results:
        assert found[0] == pytest.approx(alone[0], rel=1e-5) and found[1:] == alone[1:]
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        stages, one = lines(tmp_path / "stages", name), lines(tmp_path / "alone", name)
        assert [step for step, _ in stages] == [step for step, _ in one]
        assert [loss for _, loss in stages] == pytest.approx([loss for _, loss in one], rel=1e-4)
    summary = json.loads((tmp_path / "stages" / "summary.json").read_text())
    last, evaluated = (lines(tmp_path / "stages", name)[-1] for name in ("metrics.jsonl", "evaluations.jsonl"))
    assert (summary["step"], summary["loss"]) == last and (summary["eval_step"], summary["eval_loss"]) == evaluated


def warnings(config: dict[str, Any]) -> list[str]:
    """What this rank warns of as it trains."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    handler.setLevel(logging.WARNING)
    logging.getLogger("hybrid").addHandler(handler)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            assert make_trainer(config).train() == 0
    finally:
        logging.getLogger("hybrid").removeHandler(handler)
    return log.getvalue().splitlines()


def test_a_long_warm_up_is_said_once(pool: WorkerPool, tmp_path: Path) -> None:
    config = tree(
        tmp_path / "run", write_tokens(tmp_path), (1, 1, 2, 1), train_steps=1, lr_schedule={"warmup_steps": 7}
    )
    first, second = pool.run(warnings, 2, config)
    assert [("warmup_steps is 7 and" in line and "train_steps 1:" in line) for line in first] == [True] and not second
