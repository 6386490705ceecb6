"""From a configuration file, flags and overrides to one RunConfig."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid.config.errors import ConfigError, closest, shown
from hybrid.config.overrides import FINETUNE_FLAGS, FLAGS, apply_override, set_path
from hybrid.config.resolve import resolve_config
from hybrid.config.run import RunConfig

__all__ = ["ConfigError", "RunConfig", "apply_override", "find_config", "load_config", "read_config", "shipped_configs"]

_PACKAGE = Path(__file__).parents[1]

_CONFIG_FOLDERS = (_PACKAGE / "ds_configs", _PACKAGE.parent / "ds_configs")
"""Where the shipped files lie: in an installed package, and in a checkout."""


def shipped_configs() -> dict[str, Path]:
    """The configuration files that come with the package, by name."""
    return {path.stem: path for folder in _CONFIG_FOLDERS for path in sorted(folder.glob("*.json"))}


def find_config(path_or_name: str) -> Path:
    """A file as given, or a shipped one by its name, with or without `ds_configs/` before and `.json` after it.

    Raises:
        ConfigError: there is neither.
    """
    path = Path(path_or_name).expanduser()
    if path.is_file():
        return path
    shipped = shipped_configs()
    name = path.name.removesuffix(".json")
    if name in shipped and path.parent in (Path("."), Path("ds_configs")):
        return shipped[name]
    near = closest(name, shipped)
    hint = f"; did you mean {near}?" if near else ""
    raise ConfigError(
        [f"there is neither a file nor a shipped configuration {path_or_name}{hint} (shipped: {', '.join(shipped)})"]
    )


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object of a file.

    Raises:
        ConfigError: it is not JSON, not an object, or has a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError([f"the key {name} stands twice in one object: keep one" for name in twice], str(path))
        return dict(pairs)

    try:
        tree = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ConfigError([f"line {error.lineno}, column {error.colno} is not JSON: {error.msg}"], str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"it cannot be read: {error}"], str(path)) from None
    if not isinstance(tree, dict):
        raise ConfigError([f"it holds {shown(tree)}: it must be an object"], str(path))
    return tree


def load_config(
    path_or_name: str,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    world_size: int | None = None,
) -> RunConfig:
    """Read a file, change it by flags and then by `PATH=JSON` overrides, and resolve it.

    Args:
        flags: values of the named flags (`FLAGS`, `FINETUNE_FLAGS`); None is a flag not given.
        world_size: ranks of the run; None, for a dry run, takes what the batch triple asks for, or one replica.

    Raises:
        ConfigError: lists everything that is wrong.
    """
    path = find_config(path_or_name)
    tree = read_config(path)
    problems: list[str] = []
    for name, value in (flags or {}).items():
        if value is not None:
            tree = set_path(tree, {**FLAGS, **FINETUNE_FLAGS}[name], value)
    for override in overrides:
        try:
            tree = apply_override(tree, override)
        except ConfigError as error:
            problems += error.violations
    return resolve_config(tree, world_size, where=str(path), problems=problems)
