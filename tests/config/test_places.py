"""What cannot be written is found before it is made, also by root, whom permissions do not bind."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid.config.errors import ConfigError
from hybrid.config.places import check_file, folder_problem


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    for folder in (tmp_path, tmp_path / "new" / "deep", Path("new"), Path(".")):
        assert folder_problem(folder) is None
    assert folder_problem(Path("file")) == "file is a file, where a folder is needed"
    assert folder_problem(Path("file/new/deep")) == f"{tmp_path / 'file'} is a file, where a folder is needed"
    assert (folder_problem(Path("/proc/new")) or "").startswith("/proc cannot be written to (")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_files(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("as before")
    check_file("--write", tmp_path / "new.json", "my.json")
    check_file("--write", tmp_path / "there", "my.json")
    assert (tmp_path / "there").read_text() == "as before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]
    for path, reason in (
        (tmp_path, r"is a folder: name a file, as .*my\.json"),
        (tmp_path / "no" / "my.json", "there is no folder"),
        (Path("/proc/my.json"), "/proc cannot be written to .*: choose another"),
        (Path("/proc/version"), "cannot be written .*: choose another"),
    ):
        with pytest.raises(ConfigError, match=f"--write {path}.*{reason}"):
            check_file("--write", path, "my.json")
