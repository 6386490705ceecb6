"""What of the hub is asked for, within reach and out of it."""

from __future__ import annotations

import time
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from hybrid.config.errors import ConfigError
from hybrid.config.hub import download
from hybrid.config.model import load_model_config
from hybrid.convert.sources import open_checkpoint


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The library may go online, but nothing answers there; and nothing is in its cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub, "hf_hub_url", lambda *a, **k: "http://127.0.0.1:9/config.json")


@pytest.mark.usefixtures("no_network")
def test_without_a_network_it_is_said_soon() -> None:
    began = time.monotonic()
    for read in (load_model_config, open_checkpoint):
        with pytest.raises(ConfigError, match=r"cannot be reached.*run `hf download nobody/nothing`"):
            read("nobody/nothing")
    assert time.monotonic() - began < 5  # with the library's five repetitions, 23 s each


@pytest.mark.parametrize("answer", ["found", "denied", "silent"])
def test_a_hub_that_answers_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: str) -> None:
    def metadata(url: str, *, timeout: float) -> None:
        assert url.endswith("/some/model/resolve/main/config.json") and timeout == 5
        if answer == "denied":
            raise huggingface_hub.errors.FileMetadataError
        if answer == "silent":
            raise TimeoutError

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    asked: list[bool] = []
    assert download("some/model", lambda cached: asked.append(cached) or str(tmp_path), ValueError) == tmp_path
    assert asked == [answer == "silent"]
