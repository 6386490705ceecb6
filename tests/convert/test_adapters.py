"""Training checkpoints of adapters as models: merged as the run itself merges them, bit for bit."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from convert.cases import assert_same, read_folder
from convert.live import build
from safetensors.torch import load_file, save_file
from support.chats import tree, write_chats, write_model
from support.pool import WorkerPool

from hybrid.config.model import load_model_config
from hybrid.config.resolve import resolve_config
from hybrid.convert.cli import main
from hybrid.convert.errors import CheckpointError
from hybrid.convert.load import load_weights
from hybrid.finetune.data import chat_data
from hybrid.tensor_parallel.lora import adapter_name
from hybrid.tensor_parallel.params import named_segments
from hybrid.trainer import Trainer

R, ALPHA = 3, 5.0
RUNS: dict[str, tuple[int, dict[str, Any], str, list[str]]] = {
    "TP 2, DP 2, bf16": (
        4,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "bf16",
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    ),
    "PP 2, fp32": (2, {"pipeline_model_parallel_size": 2}, "fp32", ["v_proj", "down_proj"]),
}


def finetune(config: dict[str, Any]) -> None:
    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
    with contextlib.redirect_stdout(io.StringIO()):
        Trainer(resolve_config(config, dist.get_world_size()), torch.device("cpu"), None, chat_data()).train()


@pytest.fixture(scope="module", params=RUNS)
def trained(request: Any, pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """(run folder, its last checkpoint, its precision)."""
    world, layout, precision, targets = RUNS[request.param]
    folder = tmp_path_factory.mktemp("adapters")
    model, chats = write_model(folder / "hf"), write_chats(folder / "chat.jsonl")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"][0] = -0.0  # stays negative without an adapter
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "eos_token_id": 2}))  # the chats' end token is 1
    lora = {"r": R, "alpha": ALPHA, "targets": targets}
    config = tree(folder / "run", model, chats, layout=layout, lora=lora, train_steps=3)
    pool.run(finetune, world, {**config, "bf16": {"enabled": precision == "bf16"}})
    return folder / "run", folder / "run" / "checkpoints" / "step-00000003", precision


def converted(*words: object) -> dict[str, torch.Tensor]:
    """The tensors that a command wrote to the folder named last."""
    assert main([str(word) for word in words]) == 0
    return read_folder(Path(str(words[-1])))


Trained = tuple[Path, Path, str]


def test_the_merged_model_is_the_runs_own(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, checkpoint, precision = trained
    own = read_folder(run / "model")
    assert_same(converted("to-hf", "--checkpoint", checkpoint, "--output", tmp_path / "hf"), own)
    exported, from_checkpoint = (json.loads((d / "config.json").read_text()) for d in (run / "model", tmp_path / "hf"))
    assert exported == from_checkpoint and exported["eos_token_id"] == [1, 2]
    assert "the adapters of the training checkpoint are merged" in capsys.readouterr().out
    assert main(["verify", "--hf", str(run / "model"), "--checkpoint", str(checkpoint), "--logits"]) == 0
    assert "bitwise the same" in capsys.readouterr().out
    main(["to-sharded", "--checkpoint", str(checkpoint), "--tp", "2", "--pp", "2", "--output", str(tmp_path / "cut")])
    assert_same(converted("to-hf", "--checkpoint", tmp_path / "cut", "--output", tmp_path / "again"), own)


def test_other_dtypes_are_rounded_once(trained: Trained, tmp_path: Path) -> None:
    run, checkpoint, precision = trained
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    found = {
        name: converted("to-hf", "--checkpoint", checkpoint, "--dtype", name, "--output", tmp_path / name)
        for name in dtypes
    }
    assert_same(found[precision], read_folder(run / "model"))
    adapter = load_file(run / "adapter" / "adapter_model.safetensors")
    base = load_file(run.parent / "hf" / "model.safetensors")
    for name, weight in found["fp32"].items():
        wanted = base[name].to(dtypes[precision]).double()
        if adapter_name(name, "A") in adapter:
            a, b = (adapter[adapter_name(name, matrix)].double() for matrix in "AB")
            wanted = wanted + ALPHA / R * (b @ a)
        torch.testing.assert_close(weight.double(), wanted, rtol=2**-22, atol=1e-8)  # of fp32 sums of four terms
        for other in ("bf16", "fp16"):
            assert torch.equal(found[other][name], weight.to(dtypes[other])), name


@pytest.mark.parametrize("tp, pp, dtype", [(1, 1, torch.float32), (2, 1, torch.bfloat16)])
def test_a_run_starts_from_the_merged_weights(
    trained: Trained, pool: WorkerPool, tmp_path: Path, tp: int, pp: int, dtype: torch.dtype
) -> None:
    _, checkpoint, _ = trained
    name = str(dtype).removeprefix("torch.")
    wanted = converted("to-hf", "--checkpoint", checkpoint, "--dtype", name, "--output", tmp_path / "hf")
    for slices in pool.run(loaded, tp * pp, checkpoint, tp, pp, dtype):
        for key, source, values in slices:
            assert torch.equal(values, wanted[key][source]), key


def loaded(checkpoint: Path, tp: int, pp: int, dtype: torch.dtype) -> list[tuple[str, Any, torch.Tensor]]:
    """This rank's slices after `load_weights`."""
    config = load_model_config(str(checkpoint))
    module, _ = build(config, tp, pp, dtype)
    load_weights(module, config, checkpoint)
    return [(s.hf_name, s.source, param.detach()[s.local].clone()) for param, s in named_segments(module)]


def test_inspect_names_the_adapters(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    _, checkpoint, _ = trained
    assert main(["inspect", str(checkpoint), "--checksums"]) == 0
    assert "adapters    LoRA of rank 3, alpha 5, on " in capsys.readouterr().out


def test_settings_that_are_not_there_or_not_the_matrices(
    trained: Trained, pool: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, checkpoint, _ = trained
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["files"]["training.json"]  # whose size would be wrong
    (copy / "manifest.json").write_text(json.dumps(manifest))
    progress = json.loads((copy / "training.json").read_text())
    command = ["to-hf", "--checkpoint", str(copy), "--output", str(tmp_path / "out")]
    progress["config"]["hybrid"]["lora"]["r"] = R + 1
    (copy / "training.json").write_text(json.dumps(progress))
    assert main(command) == 2
    assert f"has shape [{R}, 32], the model needs [{R + 1}, 32]" in capsys.readouterr().err
    progress["config"]["hybrid"]["lora"] = None
    (copy / "training.json").write_text(json.dumps(progress))
    assert main(command) == 2 and main(["inspect", str(copy)]) == 1
    captured = capsys.readouterr()
    assert "r and alpha are needed" in captured.err and "r and alpha are needed" in captured.out
    with pytest.raises(CheckpointError, match="copy the whole folder"):
        pool.run(loaded, 1, copy, 1, 1, torch.float32)
    assert not (tmp_path / "out").exists()
