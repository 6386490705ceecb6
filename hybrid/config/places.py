"""Whether what a command is to write can be written, found before it works for it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hybrid.config.errors import ConfigError


def folder_problem(folder: Path) -> str | None:
    """Why no file can be written into a folder, which may have to be made first; None where one can.

    It is tried, with a file that has no name or is deleted at once: permissions do not say it all.
    """
    nearest = folder
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not nearest.is_dir():
            return f"{nearest} is a file, where a folder is needed"
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        return f"{nearest} cannot be written to ({error.strerror})"


def check_file(option: str, path: Path, example: str) -> None:
    """Whether a file can be written in a folder that is there.

    Args:
        option: that names the file.
        example: a name for it, where a folder is given.

    Raises:
        ConfigError: it cannot.
    """
    if path.is_dir():
        raise ConfigError([f"{option} {path} is a folder: name a file, as {path / example}"])
    if not path.parent.is_dir():
        raise ConfigError([f"{option} {path}: there is no folder {path.parent}: create it, or choose another"])
    if not path.exists():
        if problem := folder_problem(path.parent):
            raise ConfigError([f"{option} {path}: {problem}: choose another"])
        return
    try:
        path.open("ab").close()
    except OSError as error:
        raise unwritable(option, path, error) from None


def unwritable(option: str, path: Path, error: OSError) -> ConfigError:
    """The error of a file that cannot be written."""
    return ConfigError([f"{option} {path} cannot be written ({error.strerror}): choose another"])
