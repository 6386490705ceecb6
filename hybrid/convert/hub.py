"""Checkpoints of the Hugging Face hub, by name."""

from __future__ import annotations

import re
from pathlib import Path

from hybrid.convert.errors import CheckpointError

_NAME = re.compile(r"[\w.-]+/[\w.-]+")

_WEIGHTS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def fetch(source: str | Path) -> Path:
    """The folder `source` names; that of the cache for a repository of the hub, which is downloaded if need be.

    Raises:
        CheckpointError: there is no such folder, and no such repository or no way to it.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(["it is a file: name the folder it lies in"], str(source))
    if not _NAME.fullmatch(str(source)):
        raise CheckpointError(["there is no such folder"], str(source))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        files = snapshot_download(str(source), allow_patterns=_WEIGHTS)
        if not any(Path(files).glob("*.safetensors")):
            files = snapshot_download(str(source), allow_patterns=[*_WEIGHTS, "pytorch_model*.bin"])
    except LocalEntryNotFoundError:
        raise CheckpointError(
            [
                "there is no such folder, and the Hugging Face hub, where it may be a repository, cannot be reached "
                f"(offline, or HF_HUB_OFFLINE is set): run `hf download {source}` where there is a network, or name "
                "a folder"
            ],
            str(source),
        ) from None
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            [f"there is no such folder, and the Hugging Face hub says: {reason}"], str(source)
        ) from None
    return Path(files)
