"""setup.cfg against the tree it packages."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def test_every_package_is_listed(setup: configparser.ConfigParser) -> None:
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "hybrid").rglob("*.py")}
    expected = {".".join(folder.parts) for folder in folders} | {"hybrid.ds_configs"}
    assert set(setup["options"]["packages"].split()) == expected
    assert all((ROOT / folder / "__init__.py").is_file() for folder in folders)


def test_every_data_file_is_packaged(setup: configparser.ConfigParser) -> None:
    patterns = setup["options.package_data"]
    packaged = set()
    for package in patterns:
        folder = ROOT / ("ds_configs" if package == "hybrid.ds_configs" else package.replace(".", "/"))
        packaged |= {path for pattern in patterns[package].split() for path in folder.glob(pattern)}
    kinds = ("*.json", "*.jinja")
    present = {path for name in ("hybrid", "ds_configs") for kind in kinds for path in (ROOT / name).rglob(kind)}
    assert packaged == present | {ROOT / "hybrid" / "py.typed"}
