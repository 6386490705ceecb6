"""A run's folder: made before any work, and held, so that no second run writes into it meanwhile."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from hybrid.config.errors import ConfigError

logger = logging.getLogger(__name__)

LOCK = ".lock"
"""Name of the file in a run's folder that its run holds locked."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system says that has none."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make a run's folder and hold it; for one process of the run, whose peers learn the outcome from it.

    The lock is the kernel's, on an open file: it ends with the process, however that ends. On NFS the server has it,
    and gives up that of a host that has died when the host's lease is over. What is written in the file locks nothing;
    it is for whoever is kept out to read. A folder that was made here, and into which nothing was put, goes again.

    Raises:
        ConfigError: another run is at work there, or the folder cannot be written to.
    """
    made = not folder.exists()
    handle = _take(folder)
    try:
        yield
    finally:
        if made:
            _remove_if_empty(folder)
        os.close(handle)


def _take(folder: Path) -> int:
    """An open handle of the lock file, locked."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)  # for writing: NFS locks no other
        except OSError as error:
            raise unwritable(folder, error) from None
        try:
            _lock(handle, folder)
            if _is_there(handle, folder / LOCK):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # the run that held it has just removed it


def _is_there(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        if [entry.name for entry in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            folder.rmdir()


def unwritable(folder: Path, error: OSError) -> ConfigError:
    """The error of a run whose folder cannot be written to."""
    problem = f"{folder}, which cannot be written to ({error.strerror}): name another with --output_dir"
    return ConfigError([f"hybrid.training.output_dir is {problem}"])


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            [
                f"hybrid.training.output_dir is {folder}, where another run is at work ({_holder(folder / LOCK)}): "
                "wait until it has ended, end it, or name another folder with --output_dir"
            ]
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise unwritable(folder, error) from None
        logger.warning("%s cannot be locked (%s): see to it that no second run writes there", folder, error.strerror)
    try:
        _sign(handle)
    except OSError as error:
        raise unwritable(folder, error) from None


def _sign(handle: int) -> None:
    """Write who holds the lock, for other hosts too."""
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    content = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}) + "\n"
    os.ftruncate(handle, 0)
    os.pwrite(handle, content.encode(), 0)
    os.fsync(handle)


def _holder(path: Path) -> str:
    """Who holds the lock, in words."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return f"on host {found['host']}, process {found['pid']}, since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has the lock, and has not signed yet
        return "started just now"
