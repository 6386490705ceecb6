"""Repositories of the Hugging Face hub, by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_SECONDS = 5.0
"""In which the hub has to answer, to count as within reach."""


def is_repository_name(source: str) -> bool:
    """Whether `source` has the form of one, `owner/name`."""
    return _NAME.fullmatch(source) is not None


def download(repository: str, get: Callable[[bool], str], error: Callable[[str], Exception]) -> Path:
    """What `get` downloads of the repository, or finds in the cache, and the path of it.

    Args:
        get: told whether to look in the cache only: where the hub is out of reach, its library tries for a long time.
        error: makes the exception of a sentence, which says what went wrong and what helps.
    """
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(get(not _within_reach(repository)))
    except LocalEntryNotFoundError:
        raise error(
            "there is no such folder, and the Hugging Face hub, where it may be a repository, cannot be reached "
            f"(offline, or HF_HUB_OFFLINE is set): run `hf download {repository}` where there is a network, or name "
            "a folder"
        ) from None
    except (HfHubHTTPError, OSError) as failure:
        reason = str(failure).strip().partition("\n")[0]
        raise error(f"there is no such folder, and the Hugging Face hub says: {reason}") from None


def _within_reach(repository: str) -> bool:
    """Whether the hub answers, whatever it says of the repository; asked once."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import FileMetadataError, HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(repository, "config.json"), timeout=_SECONDS)
    except (HfHubHTTPError, FileMetadataError):
        return True
    except Exception:  # of the HTTP library, which the hub's changes from version to version
        return False
    return True
