"""What a run starts from: weights that were changed, and weights of another model, are refused by all ranks alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from convert.cases import make_source, model_config
from support.pool import WorkerPool
from support.runs import tree

from hybrid import build
from hybrid.agreement import RemoteError
from hybrid.config.errors import ConfigError
from hybrid.config.resolve import resolve_config
from hybrid.convert.common import Job
from hybrid.convert.sharded import plan_layout, write_sharded
from hybrid.convert.sources import open_checkpoint
from hybrid.grid import build_grid


def outcomes(config: dict[str, Any], sources: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """The refusal of each (folder, changes to the model), "" if there is none."""
    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
    messages, made, pipeline = [], [], build.LlamaPipeline

    def make(*args: Any, **options: Any) -> Any:
        made.append(args)
        return pipeline(*args, **options)

    build.LlamaPipeline = make
    for source, changes in sources:
        model = {**config["hybrid"]["model"], **changes}
        hybrid = {**config["hybrid"], "init_from": source, "model": model}
        run = resolve_config({**config, "hybrid": hybrid}, 2)
        grid = build_grid(run.parallel, run.model.num_key_value_heads)
        made.clear()
        try:
            build.build_module(run, grid, torch.device("cpu"))
            messages.append("")
        except (ConfigError, RemoteError) as error:
            assert not made, "it is refused before a model is made"
            messages.append(str(error))
    build.LlamaPipeline = pipeline
    return messages


def test_what_a_run_must_not_start_from(pool: WorkerPool, tmp_path: Path) -> None:
    model = model_config("llama2")
    source = make_source(tmp_path / "hf", "llama2")
    sharded, changed = tmp_path / "sharded", tmp_path / "changed"
    for output in (sharded, changed):
        write_sharded(open_checkpoint(source), plan_layout(model, 2, 2), Job(output=output))
    file = changed / "model-pp01-tp00.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    config = tree(tmp_path, str(tmp_path / "tokens"), (2, 1, 1, 1), model=model.to_hf("fp32"))
    other = {"hidden_size": 64, "head_dim": 4, "num_hidden_layers": 3}
    cases = [(str(source), {}), (str(sharded), {}), (str(changed), {}), (str(source), other)]
    first, second = pool.run(outcomes, 2, config, cases)
    assert first[:2] == second[:2] == ["", ""]
    assert second[2:] == [f"rank 0: {message}" for message in first[2:]]  # told by one rank, with its words
    assert f"in {file.name} was changed: its checksum is not the manifest's" in first[2]
    assert first[3].count("\n") <= 1 and "it is another model than the run's: hidden_size 32 in it, 64" in first[3]
    assert "num_hidden_layers 4 in it, 3 in the run" in first[3] and "num_attention_heads" not in first[3]


def test_more_tokens_than_the_weights_have(tmp_path: Path) -> None:
    source = make_source(tmp_path / "hf", "llama2")
    larger = model_config("llama2").model_copy(update={"vocab_size": 140})
    build.check_model(source, larger, resize_vocab=True)
    with pytest.raises(ConfigError, match="vocab_size 131 in it, 140 in the run"):
        build.check_model(source, larger)
