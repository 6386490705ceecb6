"""Which checkpoint a run goes on from; what is damaged is passed over or refused, on every rank alike."""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.pool import WorkerPool
from support.runs import make_trainer, run, tree, write_tokens

from hybrid.agreement import RemoteError
from hybrid.checkpoint.select import choose
from hybrid.convert.errors import CheckpointError

RANKS = 2


@pytest.fixture(scope="module")
def finished(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run folder with checkpoints of steps 2, 4 and 6, and its token file."""
    folder = tmp_path_factory.mktemp("finished")
    tokens = write_tokens(folder)
    pool.run(run, RANKS, tree(folder / "run", tokens, (1, 1, 2, 2), train_steps=6, save_every=2))
    return folder / "run", tokens


@pytest.fixture
def root(finished: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of its checkpoints."""
    shutil.copytree(finished[0] / "checkpoints", tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def outcome(resume: str, root: Path) -> tuple[str, str]:
    """(the checkpoint's name or the error, warnings) of this rank."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("hybrid").addHandler(handler)
    try:
        path = choose(resume, root)
        return "fresh" if path is None else path.name, log.getvalue()
    except CheckpointError as error:
        return f"error: {error}", log.getvalue()
    finally:
        logging.getLogger("hybrid").removeHandler(handler)


@pytest.fixture
def chosen(pool: WorkerPool) -> Callable[[str, Path], tuple[str, str]]:
    """`outcome`, which has to be the same on every rank; the warnings are rank 0's."""

    def get(resume: str, root: Path) -> tuple[str, str]:
        results = pool.run(outcome, RANKS, resume, root)
        assert results[0][0] == results[1][0] and results[1][1] == ""
        return results[0][0], results[0][1]

    return get


Chosen = Callable[[str, Path], tuple[str, str]]


def flip(path: Path, position: int = -100) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


def test_the_newest_complete_one(chosen: Chosen, root: Path) -> None:
    for resume in ("auto", "latest", str(root), str(root.parent), str(root / "latest")):
        assert chosen(resume, root) == ("step-00000006", "")
    assert chosen(str(root / "step-00000002"), root)[0] == "step-00000002"
    assert chosen("none", root)[0] == "fresh"


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: (path / "config.json").write_text("{"), "config.json has 1 bytes, the manifest says"),
    "bit flipped in a tensor": (
        lambda path: flip(path / "model-pp00-tp00-dp01-0.safetensors"),
        "in model-pp00-tp00-dp01-0.safetensors was changed: its checksum is not the manifest's",
    ),
    "bit flipped in the state": (
        lambda path: flip(path / "training.json"),
        "training.json was changed",
    ),
    "missing rank file": (
        lambda path: (path / "model-pp00-tp00-dp01-0.safetensors").unlink(),
        "model-pp00-tp00-dp01-0.safetensors is missing",
    ),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "it has no manifest.json"),
    "broken manifest": (lambda path: (path / "manifest.json").write_text("{"), "cannot be read as JSON"),
    "not there": (lambda path: shutil.rmtree(path), "step-00000006: the pointer"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_passed_over_and_said(chosen: Chosen, root: Path, kind: str) -> None:
    harm, reason = DAMAGE[kind]
    harm(root / "step-00000006")
    name, warnings = chosen("auto", root)
    assert name == "step-00000004"
    assert "step-00000006" in warnings and reason in warnings
    if kind != "not there":
        name, _ = chosen(str(root / "step-00000006"), root)
        assert name.startswith("error:") and (reason in name or kind == "no manifest")


def test_a_save_that_was_killed_is_said(chosen: Chosen, root: Path) -> None:
    shutil.copytree(root / "step-00000006", root / ".step-00000008.writing")
    name, warnings = chosen("auto", root)
    assert name == "step-00000006" and ".step-00000008.writing: a run ended while it was written" in warnings


def test_nothing_sound_is_an_error_unless_a_fresh_start_was_asked_for(chosen: Chosen, root: Path) -> None:
    for path in root.glob("step-*"):
        (path / "manifest.json").unlink()
    name, _ = chosen("auto", root)
    reasons = [
        f"  {number}. step-0000000{step}: it has no manifest.json, so it was never completed"
        for number, step in enumerate((6, 4, 2), start=1)
    ]
    assert name.splitlines() == [
        f"error: 3 problems in {root}, which holds no sound checkpoint (hybrid.training.resume is auto):",
        *reasons,
        "To go on, name the folder of one, or of a run that has one, or start afresh with --resume none.",
    ]
    assert chosen("none", root)[0] == "fresh"


def test_wrong_paths(chosen: Chosen, tmp_path: Path) -> None:
    assert chosen("auto", tmp_path / "checkpoints")[0] == "fresh"
    own, file = tmp_path / "checkpoints", tmp_path / "file"
    file.touch()
    remedy = (
        ": name the folder of a checkpoint or of a run, or give auto (the newest of this run, if there is one) or none"
    )
    for resume, root, sentence in [
        ("latest", own, f"hybrid.training.resume is latest, but {own} holds no checkpoint: name the folder of one"),
        (tmp_path, own, f"hybrid.training.resume is {tmp_path}, but {tmp_path} holds no checkpoint: name the folder"),
        (tmp_path / "no", own, f"hybrid.training.resume is {tmp_path / 'no'}, which does not exist{remedy}"),
        (file / "below", own, f"hybrid.training.resume is {file / 'below'}, which does not exist{remedy}"),
        (file, own, f"hybrid.training.resume is {file}, which is a file{remedy}"),
        *(
            (
                resume,
                file / "run" / "checkpoints",
                f"hybrid.training.output_dir is {file / 'run'}, but {file} is a file",
            )
            for resume in ("auto", "none", tmp_path)
        ),
    ]:
        name, _ = chosen(str(resume), root)
        assert name.startswith(f"error: 1 problem in the configuration:\n  1. {sentence}"), name
        assert name.count("problem") == 1 and name.count("  1. ") == 1
    (tmp_path / "latest").write_text("step-00000009\n")
    assert "it is not there" in chosen("auto", tmp_path)[0]


def test_a_first_save_that_was_killed_leaves_a_fresh_start(chosen: Chosen, tmp_path: Path) -> None:
    (tmp_path / ".step-00000001.writing").mkdir()
    assert chosen("auto", tmp_path)[0] == "fresh"


def refusal(config: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            make_trainer(config)
        except (CheckpointError, RemoteError) as error:
            return f"{type(error).__name__}: {error}"
    return "none"


def told_once(messages: list[str]) -> str:
    """A refusal, which rank 0 tells; the others have it from there."""
    (own,) = messages[:1]
    text = own.removeprefix("CheckpointError: ")
    assert text != own and messages[1:] == [f"RemoteError: rank 0: {text}"] * (RANKS - 1)
    return text


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model": {"hidden_size": 64}}, ["hybrid.model.hidden_size is 32 in the checkpoint, 64 in this run"]),
        ({"model": {"rope_theta": 1e6}}, ["hybrid.model.rope.rope_theta is 10000.0", "1000000.0 in this run"]),
        ({"model": {"tie_word_embeddings": True}}, ["hybrid.model.tie_word_embeddings is false"]),
        ({"seed": 4}, ["hybrid.training.seed is 3 in the checkpoint, 4 in this run"]),
        ({"seq_length": 16}, ["hybrid.data.seq_length is 8 in the checkpoint, 16 in this run"]),
        ({"source": "other"}, ["hybrid.data.source is"]),
        ({"lora": {"r": 2}}, ["hybrid.lora is null in the checkpoint", "with --init_from and --resume none"]),
        ({"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}, ["optimizer.type is AdamW in the checkpoint, Lion"]),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else "",
)
def test_a_run_that_is_another_is_refused_by_field(
    pool: WorkerPool, finished: tuple[Path, str], tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    folder, tokens = finished
    if changes.get("source") == "other":
        changes = {"source": write_tokens(tmp_path, seed=1)}
    before = sorted(path.name for path in (folder / "checkpoints").iterdir())
    config = tree(folder, tokens, (1, 1, 2, 2), **{"train_steps": 9, **changes})
    messages = pool.run(refusal, RANKS, config)
    refused = told_once(messages)
    assert all(word in refused for word in words), refused
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == before


def test_the_same_name_with_another_content_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path)
    config = tree(tmp_path / "run", tokens, (1, 1, 2, 2), train_steps=2)
    pool.run(run, RANKS, config)
    write_tokens(tmp_path, seed=2)
    messages = pool.run(refusal, RANKS, {**config, "hybrid": {**config["hybrid"]}})
    assert "not the same content" in told_once(messages)


def test_weights_alone_are_no_run(pool: WorkerPool, finished: tuple[Path, str], tmp_path: Path) -> None:
    import json

    folder, tokens = finished
    shutil.copytree(folder / "checkpoints" / "step-00000006", tmp_path / "weights")
    manifest = json.loads((tmp_path / "weights" / "manifest.json").read_text())
    del manifest["files"]["training.json"]
    (tmp_path / "weights" / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "weights" / "training.json").unlink()
    config = tree(tmp_path / "run", tokens, (1, 1, 2, 2), resume=str(tmp_path / "weights"))
    messages = pool.run(refusal, RANKS, config)
    assert "--init_from" in told_once(messages)


def test_an_earlier_checkpoint_starts_a_branch_and_loses_nothing(
    pool: WorkerPool, finished: tuple[Path, str], tmp_path: Path
) -> None:
    folder, tokens = finished
    shutil.copytree(folder, tmp_path / "run")
    root = tmp_path / "run" / "checkpoints"
    config = tree(
        tmp_path / "run", tokens, (1, 1, 2, 2), train_steps=6, stop_after_steps=1, resume=str(root / "step-00000002")
    )
    pool.run(run, RANKS, config)
    assert {path.name for path in root.iterdir()} == {
        "latest", "step-00000002", "step-00000003", "unused-step-00000004-1", "unused-step-00000006-1",
    }  # fmt: skip
    assert (root / "latest").read_text() == "step-00000003\n"
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert lines[:3] == (folder / "metrics.jsonl").read_text().splitlines()[:2] + lines[2:3] and len(lines) == 3
