"""Directories that appear whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybrid.config.places import folder_problem
from hybrid.convert.errors import CheckpointError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates",
)

COMPANIONS = ("generation_config.json", *TOKENIZER_FILES)
"""Files (and a folder) beside the weights that belong to the model; they are copied byte for byte."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_target(directory: Path, *, overwrite: bool) -> None:
    """Whether a folder can be written, which takes no time; what writes it may have much to do first.

    Raises:
        CheckpointError: there is something already that is not to be replaced, or nothing can be written there.
    """
    if not overwrite and directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(["it is there already: choose another folder, or --overwrite"], str(directory))
    if problem := folder_problem(directory.parent):
        raise CheckpointError([f"it cannot be written, for {problem}: choose another folder"], str(directory))


@contextmanager
def staged(directory: Path, *, overwrite: bool, size: int = 0) -> Iterator[Path]:
    """A folder to fill, which becomes `directory` when the block ends well, and is removed when it does not.

    Args:
        overwrite: replace what is there; otherwise only an empty folder may be.
        size: bytes that will be written, to find a full disk at once.

    Raises:
        CheckpointError: as `check_target`, or the disk is full.
    """
    check_target(directory, overwrite=overwrite)
    staging = directory.with_name(f".{directory.name}.writing")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staging, ignore_errors=True)
        if (free := shutil.disk_usage(directory.parent).free) < size:
            raise CheckpointError([f"{size:,} bytes are to be written, the disk has {free:,} left"], str(directory))
        staging.mkdir()
        yield staging
        _sync_tree(staging)
        _put_in_place(staging, directory)
    except OSError as error:
        _remove(staging)
        if error.errno in _FULL:
            raise CheckpointError(
                [f"the disk is full ({error.strerror}): free about {size:,} bytes; nothing was left behind"],
                str(directory),
            ) from error
        raise CheckpointError([f"it cannot be written: {error}"], str(directory)) from error
    except BaseException:
        _remove(staging)
        raise


def _remove(staging: Path) -> None:
    shutil.rmtree(staging, ignore_errors=True)


def _put_in_place(staging: Path, directory: Path) -> None:
    old = directory.with_name(f".{directory.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    staging.rename(directory)
    sync(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        sync(path)
    sync(directory)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """As transformers writes its files."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy what lies beside the weights; the names of the files, relative to the folder."""
    copied = []
    for name in COMPANIONS:
        path = source / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                relative = file.relative_to(source)
                (target / relative).parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target / relative)
                copied.append(str(relative))
    return copied


def highest_token_id(directory: Path) -> int | None:
    """The highest id the tokenizer in a folder can produce, or None if no file tells it."""
    ids = [-1]
    tokenizer = _read_object(directory / "tokenizer.json")
    vocab = tokenizer.get("model", {}).get("vocab", {})
    ids += vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    ids += [token["id"] for token in tokenizer.get("added_tokens", [])]
    ids += _read_object(directory / "added_tokens.json").values()
    ids += map(int, _read_object(directory / "tokenizer_config.json").get("added_tokens_decoder", {}))
    highest = max(ids)
    return None if highest < 0 else highest


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError([f"it cannot be read as JSON: {error}"], str(path)) from None
    return content if isinstance(content, dict) else {}
