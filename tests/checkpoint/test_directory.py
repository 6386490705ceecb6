"""The folder of checkpoints: what is complete, what stays, what is set aside."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid.checkpoint import directory


def commit(root: Path, *steps: int) -> None:
    for step in steps:
        (directory.begin(root, step) / "data").write_text(str(step))
        directory.commit(root, step, "{}")


def test_a_checkpoint_has_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    commit(tmp_path, 5)
    staging = directory.begin(tmp_path, 20)
    (staging / "data").write_text("half")
    assert list(directory.steps(tmp_path)) == [5]
    assert directory.pointed_to(tmp_path) == "step-00000005"
    assert directory.leftovers(tmp_path) == [staging]
    directory.commit(tmp_path, 20, "{}")
    assert list(directory.steps(tmp_path)) == [20, 5]
    assert directory.pointed_to(tmp_path) == "step-00000020"
    assert directory.leftovers(tmp_path) == []


def test_beginning_again_starts_from_an_empty_folder(tmp_path: Path) -> None:
    (directory.begin(tmp_path, 1) / "old").write_text("")
    assert list(directory.begin(tmp_path, 1).iterdir()) == []


@pytest.mark.parametrize(
    "keep_last, keep_every, expected",
    [
        (0, 0, {2, 4, 5, 6, 8, 10, 12}),
        (0, 4, {2, 4, 5, 6, 8, 10, 12}),
        (2, 0, {10, 12}),
        (1, 5, {5, 10, 12}),
        (9, 0, {2, 4, 5, 6, 8, 10, 12}),
    ],
)
def test_what_is_retained(keep_last: int, keep_every: int, expected: set[int]) -> None:
    assert directory.retained([2, 4, 5, 6, 8, 10, 12], keep_last, keep_every) == expected


def test_pruning_counts_complete_checkpoints_only(tmp_path: Path) -> None:
    commit(tmp_path, 1, 2, 3)
    (tmp_path / "step-00000009").mkdir()
    assert [path.name for path in directory.prune(tmp_path, 2, 0)] == ["step-00000001"]
    assert list(directory.steps(tmp_path)) == [9, 3, 2]


def test_a_checkpoint_being_deleted_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(tmp_path, 1, 2)
    monkeypatch.setattr("shutil.rmtree", lambda path, ignore_errors=False: None)  # killed before the files go
    directory.remove(tmp_path / "step-00000001")
    monkeypatch.undo()
    assert list(directory.steps(tmp_path)) == [2]
    directory.clean(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step-00000002"}


def test_later_steps_are_set_aside_and_never_lost(tmp_path: Path) -> None:
    commit(tmp_path, 1, 2, 3)
    assert [path.name for path in directory.set_aside(tmp_path, 1)] == [
        "unused-step-00000003-1",
        "unused-step-00000002-1",
    ]
    assert directory.pointed_to(tmp_path) == "step-00000001"
    commit(tmp_path, 3)
    assert [path.name for path in directory.set_aside(tmp_path, 0)] == [
        "unused-step-00000003-2",
        "unused-step-00000001-1",
    ]
    assert directory.pointed_to(tmp_path) is None and directory.steps(tmp_path) == {}
    assert (tmp_path / "unused-step-00000003-1" / "data").read_text() == "3"
    assert directory.set_aside(tmp_path / "nowhere", 0) == []
