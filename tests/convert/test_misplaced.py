"""Folders beside the one that was meant: the message names the right one."""

import pytest
from convert.cases import make_source

from hybrid.config.errors import ConfigError
from hybrid.convert.cli import main
from hybrid.convert.misplaced import check_place
from hybrid.convert.sources import open_checkpoint


def test_the_folder_of_a_run(tmp_path, capsys):
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (run / "config.json").write_text('{"train_batch_size": 4, "hybrid": {"model": "demo"}}')  # as every run has
    with pytest.raises(ConfigError, match="folder of a run, not of a checkpoint: it has no model and no complete"):
        open_checkpoint(run)
    for step in (2, 10, 12):
        (checkpoints / f"step-{step:08d}").mkdir()
    for step in (2, 10):
        (checkpoints / f"step-{step:08d}" / "manifest.json").touch()
    for folder, what in ((run, "folder of a run"), (checkpoints, "folder of a run's checkpoints")):
        with pytest.raises(ConfigError, match=f"{what}, not of a checkpoint: name {checkpoints}/step-00000010$"):
            open_checkpoint(folder)
    make_source(run / "model", "llama2")
    assert main(["to-hf", "--checkpoint", str(run), "--output", str(tmp_path / "out")]) == 2
    assert f"name {run}/model or {checkpoints}/step-00000010" in capsys.readouterr().err
    check_place(run / "model")


def test_an_adapter(tmp_path, capsys):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).touch()
    with pytest.raises(ConfigError, match="it is a PEFT adapter, without the model it belongs to: merge it with PEFT"):
        open_checkpoint(adapter)
    make_source(tmp_path / "model", "llama2")
    assert main(["inspect", str(adapter)]) == 1
    assert f"its merged weights are in {tmp_path / 'model'}" in capsys.readouterr().out
