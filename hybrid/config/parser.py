"""The command line of every script: no abbreviated flags, and the nearest one for a flag that is not there."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NoReturn

from hybrid.config.errors import closest
from hybrid.config.training import HybridConfig
from hybrid.output import say

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

_UNKNOWN = "unrecognized arguments: "


class ArgumentParser(argparse.ArgumentParser):
    """An abbreviation that is accepted today is ambiguous, or means something else, with the next flag."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Print what `--help` asks for."""
        if file is None:
            say(self.format_help().rstrip("\n"))
        else:
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        """End with code 2."""
        if not message.startswith(_UNKNOWN):
            super().error(message)
        words = message.removeprefix(_UNKNOWN).split()
        flags = [word.partition("=")[0] for word in words if word.startswith("-")]
        self.exit(2, "".join(f"{self.prog}: {self._unknown(flag)}\n" for flag in flags or words))

    def _unknown(self, flag: str) -> str:
        key = flag.lstrip("-").replace("-", "_")
        if not flag.startswith("-"):
            return f"unknown argument {flag}: a value follows its flag"
        if suggestion := closest(f"--{key}", self._option_string_actions, 0.7):
            return f"unknown flag {flag}: did you mean {suggestion}?"
        if "--set" in self._option_string_actions and key in HybridConfig.model_fields:
            return f"unknown flag {flag}: it is a key of the configuration, --set hybrid.{key}=VALUE"
        return f"unknown flag {flag}: --help lists them"
