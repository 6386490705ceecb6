"""The message of a wrong configuration."""

from __future__ import annotations

import pickle

import pytest

from hybrid.config.errors import ConfigError, nearest, shown, unknown_key

KNOWN = {"a.train_steps", "a.seed", "b.enabled", "c.enabled", "c.output_path", "top"}


def test_numbered_lines() -> None:
    error = ConfigError(["first", "second"], "run.json")
    assert str(error) == "2 problems in run.json:\n  1. first\n  2. second"
    assert error.violations == ("first", "second")
    assert str(ConfigError(["only"])).startswith("1 problem in")
    helped = ConfigError(["first"], "run.json", "Do this.")
    assert str(helped) == str(pickle.loads(pickle.dumps(helped))) == "1 problem in run.json:\n  1. first\nDo this."


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("a.train_step", "a.train_steps"),
        ("train_steps", "a.train_steps"),
        ("b.output_path", "c.output_path"),
        ("b.enable", "b.enabled"),
        ("c.enable", "c.enabled"),
        ("tops", "top"),
        ("a.xyz", None),
    ],
)
def test_nearest(path: str, meant: str | None) -> None:
    assert nearest(path, KNOWN) == meant


def test_without_a_similar_name_the_neighbours_are_listed() -> None:
    assert unknown_key("a.xyz", KNOWN) == "unknown key a.xyz: the keys here are seed, train_steps"


def test_long_values_are_shortened() -> None:
    assert shown("x" * 200).endswith("...") and len(shown("x" * 200)) == 80


def test_a_section_that_does_not_exist() -> None:
    assert unknown_key("hybrid..x", {"hybrid.data"}) == "unknown key hybrid..x: there is no section hybrid."
