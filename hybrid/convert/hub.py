"""Checkpoints of the Hugging Face hub, by name."""

from __future__ import annotations

from pathlib import Path

from hybrid.config.hub import download, is_repository_name
from hybrid.convert.errors import CheckpointError

_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def fetch(source: str | Path) -> Path:
    """The folder `source` names; that of the cache for a repository of the hub, which is downloaded if need be.

    Raises:
        CheckpointError: there is no such folder, and no such repository or no way to it.
    """
    path, name = Path(source).expanduser(), str(source)
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(["it is a file: name the folder it lies in"], name)
    if not is_repository_name(name):
        raise CheckpointError(["there is no such folder"], name)

    def snapshot(cached: bool) -> str:
        from huggingface_hub import snapshot_download

        files = snapshot_download(name, allow_patterns=_FILES, local_files_only=cached)
        if any(Path(files).glob("*.safetensors")):
            return files
        return snapshot_download(name, allow_patterns=[*_FILES, "pytorch_model*.bin"], local_files_only=cached)

    return download(name, snapshot, lambda sentence: CheckpointError([sentence], name))
