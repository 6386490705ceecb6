"""Files, flags and overrides; the shipped configurations; the cost of the import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybrid.config.errors import ConfigError
from hybrid.config.load import find_config, load_config, shipped_configs

SHIPPED = {
    "z1": 1,
    "z2": 1,
    "z1_pp2": 2,
    "z2_tp2": 2,
    "z2_tp2_pp2": 4,
    "z2_tp4_sp": 4,
    "lora_tp2": 2,
    "llama2_7b_tp8_pp1": 64,
    "llama3_8b_tp4_pp2": 64,
    "llama3_70b_tp8_pp8": 512,
}
"""A fitting world size of each."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    tree: dict[str, Any] = {"train_batch_size": 8, "hybrid": {"data": {"seq_length": 64}, "training": {"seed": 1}}}
    path.write_text(json.dumps(tree))
    return path


@pytest.mark.parametrize(("name", "world_size"), SHIPPED.items())
def test_shipped_configs_load(name: str, world_size: int) -> None:
    run = load_config(name, world_size=world_size)
    assert run.parallel.world_size == world_size and run.precision == "bf16"
    assert (
        load_config(name, world_size=2 * world_size).parallel.data_parallel_size == 2 * run.parallel.data_parallel_size
    )
    load_config(name)


def test_every_shipped_config_is_tried() -> None:
    assert shipped_configs().keys() == SHIPPED.keys()


def test_the_default_run() -> None:
    run = load_config("z2_tp2")
    assert (run.parallel.world_size, run.zero_stage, run.parallel.sequence_parallel) == (2, 2, True)
    assert (run.hybrid.training.train_steps, run.tokens_per_step, run.gradient_clipping) == (100, 2048, 1.0)
    assert (run.hybrid.training.eval_every, run.optimizer_params["lr"]) == (25, 3e-3)
    assert (run.hybrid.model, run.hybrid.data.source) == ("demo", "demo")


def test_the_configuration_of_adapters() -> None:
    run = load_config("lora_tp2", world_size=4)
    assert run.hybrid.lora is not None and len(run.hybrid.lora.targets) == 7
    assert (run.hybrid.lora.r, run.hybrid.lora.alpha, run.parallel.data_parallel_size) == (16, 32.0, 2)
    assert [load_config(name).hybrid.lora for name in SHIPPED if name != "lora_tp2"] == [None] * (len(SHIPPED) - 1)


@pytest.mark.parametrize("name", ["z2_tp2", "z2_tp2.json", "ds_configs/z2_tp2.json", "ds_configs/z2_tp2"])
def test_names_work_from_any_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config(name) == shipped_configs()["z2_tp2"]


def test_a_file_goes_before_a_shipped_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("z2").write_text("{}")
    assert find_config("z2") == Path("z2")


def test_unknown_names_list_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match=r"z2_tp3; did you mean z2_tp2\w*\? \(shipped: llama2_7b_tp8_pp1, "):
        find_config("z2_tp3")
    with pytest.raises(ConfigError, match="missing/z2_tp2.json"):
        find_config("missing/z2_tp2.json")


def test_overrides_go_over_flags_and_flags_over_the_file(file: Path) -> None:
    run = load_config(str(file), ["hybrid.training.seed=3"], {"seed": 2, "seq_length": 32, "data": None}, 1)
    assert (run.hybrid.training.seed, run.hybrid.data.seq_length, run.hybrid.data.source) == (3, 32, "demo")


def test_flags_reach_their_paths(file: Path) -> None:
    flags = {
        "train_steps": 3,
        "model": "llama3.2-1b",
        "tokenizer": "tok",
        "data": ["a.jsonl", "b.jsonl"],
        "output_dir": "out",
        "resume": "latest",
        "init_from": "weights",
        "save_every": 5,
        "eval_every": 6,
    }
    run = load_config(str(file), flags=flags, world_size=1)
    training = run.hybrid.training
    assert (training.train_steps, training.save_every, training.eval_every) == (3, 5, 6)
    assert (training.output_dir, training.resume) == ("out", "latest")
    assert (run.hybrid.model, run.hybrid.tokenizer, run.hybrid.init_from) == ("llama3.2-1b", "tok", "weights")
    assert run.hybrid.data.source == ["a.jsonl", "b.jsonl"]
    assert run.model.tie_word_embeddings and run.model.rope.factor == 32.0


def test_wrong_overrides_are_listed_with_the_rest(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(str(file), ["hybrid.tp=2", "zero_optimization.stage=3", "nonsense"], world_size=3)
    assert str(caught.value).startswith(f"4 problems in {file}:")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "b" 2}', "line 2, column 6 is not JSON"),
        ("[]", "it must be an object"),
        ('{"hybrid": {"model": "a", "model": "b"}}', "the key model stands twice"),
        ("", "is not JSON"),
    ],
)
def test_broken_files(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(str(file))
    assert str(file) in str(caught.value)


def test_a_byte_order_mark_is_no_fault(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert load_config(str(file), world_size=1).global_batch_size == 8


def test_the_import_is_light() -> None:
    code = (
        "import sys, time; start = time.process_time(); import hybrid.config.cli, hybrid.config.describe\n"
        "print(time.process_time() - start, *{name.split('.')[0] for name in sys.modules})"
    )
    seconds, *modules = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "deepspeed", "transformers", "numpy", "datasets"} & set(modules)
    # CPU time, so that other processes do not count; 0.15 s measured.
    assert float(seconds) < 0.5
