"""The error of a configuration, and the search for the name a user probably meant."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence

_LONGEST_VALUE = 80


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, in one message of numbered lines."""

    def __init__(self, violations: Sequence[str], where: str = "the configuration", remedy: str = "") -> None:
        self.violations = tuple(violations)
        """One sentence each: the bad value, the rule, the remedy."""
        self.where = where
        self.remedy = remedy
        """What helps against all of them, on a line of its own below."""
        count = counted(len(self.violations), "problem")
        lines = [f"  {number}. {violation}" for number, violation in enumerate(self.violations, start=1)]
        super().__init__("\n".join([f"{count} in {where}:", *lines, *([remedy] if remedy else [])]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...], str, str]]:
        return type(self), (self.violations, self.where, self.remedy)


def counted(count: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def shown(value: object) -> str:
    """`value` as it stands in a JSON file, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def nearest(path: str, known: Iterable[str]) -> str | None:
    """The dotted path in `known` that `path` most likely means, or None if none is like it.

    A slip in a name of the same section comes first, then the right name in a wrong section, then anything similar:
    `nearest("train_steps", {"hybrid.training.train_steps"})` finds it.
    """
    paths = sorted(known)
    section, _, name = path.rpartition(".")
    siblings = {p.rpartition(".")[2]: p for p in paths if p.rpartition(".")[0] == section}
    everywhere = {p.rpartition(".")[2]: p for p in paths}
    named = [p for p in paths if p.rpartition(".")[2] == name]
    same_name = {name: named[0]} if len(named) == 1 else {}
    # The top level has so many names that only a very similar one beats the right name in a section.
    slip = 0.72 if section else 0.9
    for names, cutoff in ((siblings, slip), (same_name, 1.0), (siblings, 0.6), (everywhere, 0.75)):
        if found := closest(name, names, cutoff):
            return names[found]
    return None


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar of the known names, or None if none is similar."""
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def unknown_key(path: str, known: Iterable[str]) -> str:
    """The violation for a key that nothing reads."""
    known = list(known)
    if suggestion := nearest(path, known):
        return f"unknown key {path}: did you mean {suggestion}?"
    section = path.rpartition(".")[0]
    siblings = sorted(k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == section)
    if not siblings:
        return f"unknown key {path}: there is no section {section}"
    return f"unknown key {path}: the keys here are {', '.join(siblings)}"
