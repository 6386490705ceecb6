"""Folders beside the one that was meant: that of a run, and adapters without their model."""

from __future__ import annotations

import json
from pathlib import Path

from hybrid.convert.errors import CheckpointError

_CHECKPOINTS = "checkpoints"
_STEPS = "step-*"
_ADAPTER = "adapter_config.json"


def check_place(path: Path) -> None:
    """Raises:
    CheckpointError: the folder is a run's or an adapter's; names the folder with the weights.
    """
    if (path / "manifest.json").is_file() or _is_a_models(path / "config.json"):
        return
    if (path / _ADAPTER).is_file():
        raise CheckpointError([f"it is a PEFT adapter, without the model it belongs to: {_merged(path)}"], str(path))
    steps = _complete(path)
    model = (path.parent if path.name == _CHECKPOINTS else path) / "model"
    if not steps and not (path / _CHECKPOINTS).is_dir() and not (path / "model" / "config.json").is_file():
        return
    steps = steps or _complete(path / _CHECKPOINTS)
    choices = [model] if (model / "config.json").is_file() else []
    choices += steps[-1:]
    what = "it is the folder of a run's checkpoints" if path.name == _CHECKPOINTS else "it is the folder of a run"
    remedy = f"name {' or '.join(map(str, choices))}" if choices else "it has no model and no complete checkpoint yet"
    raise CheckpointError([f"{what}, not of a checkpoint: {remedy}"], str(path))


def _is_a_models(config: Path) -> bool:
    """Whether it is there and describes a model: a run's own config.json is its resolved configuration."""
    try:
        content = json.loads(config.read_bytes())
    except OSError:
        return False
    except ValueError:
        return True  # whoever reads it as a model's says what is wrong with it
    return not (isinstance(content, dict) and "hybrid" in content)


def _complete(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(_STEPS) if (path / "manifest.json").is_file())


def _merged(adapter: Path) -> str:
    model = adapter.resolve().parent / "model"
    if (model / "config.json").is_file():
        return f"its merged weights are in {adapter.parent / 'model'}"
    return "merge it with PEFT (merge_and_unload, save_pretrained) and name the folder that gives"
