"""The error of a checkpoint that cannot be read, or written."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid.config.errors import ConfigError

_LISTED = 40


class CheckpointError(ConfigError):
    """Everything that is wrong with a checkpoint, in one message of numbered lines."""


def listed(names: Sequence[str]) -> str:
    """Names for a message; a wholly different model has too many to be of use."""
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"
