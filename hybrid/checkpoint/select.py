"""Finds the checkpoint a run goes on from, and says what it passed over and why."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed as dist

from hybrid.agreement import everyone, from_rank_zero
from hybrid.checkpoint.directory import FOLDER, leftovers, pointed_to, steps
from hybrid.config.errors import ConfigError
from hybrid.convert.errors import CheckpointError, listed
from hybrid.convert.integrity import checksum_problems
from hybrid.convert.manifest import MANIFEST, Manifest, file_problems, read_manifest

logger = logging.getLogger(__name__)

AUTO, LATEST, NONE = "auto", "latest", "none"
"""What `--resume` takes besides a folder."""


@dataclass(frozen=True)
class Candidates:
    """Folders that may hold what a run can go on from, the preferred one first."""

    paths: list[Path] = field(default_factory=list)
    folder: Path = Path()
    """Where they were looked for."""
    passed_over: list[str] = field(default_factory=list)
    needed: bool = False
    """Going on was asked for, or there is something to go on from: without a sound candidate the run must not start."""


def candidates(resume: str, root: Path) -> Candidates:
    """Look for checkpoints; only names and the pointer are read.

    Args:
        resume: `hybrid.training.resume`.
        root: the run's own folder of checkpoints.

    Raises:
        CheckpointError: what `resume` names is not there, or the run's own folder cannot be one.
    """
    if (file := _file_above(root)) is not None:
        raise CheckpointError(
            [
                f"hybrid.training.output_dir is {root.parent}, but {file} is a file, where a folder is needed: "
                "name another with --output_dir"
            ]
        )
    if resume == NONE:
        return Candidates()
    if resume in (AUTO, LATEST):
        found = _all_in(root)
        return replace(found, needed=found.needed or resume == LATEST)
    path = Path(resume).expanduser()
    if path.is_file() and path.name == LATEST:
        path = path.parent / path.read_text(encoding="utf-8", errors="replace").strip()
    elif not path.is_dir():
        fault = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(
            [
                f"hybrid.training.resume is {resume}, which {fault}: name the folder of a checkpoint or of a run, or "
                f"give {AUTO} (the newest of this run, if there is one) or {NONE} (a fresh start)"
            ]
        )
    if (path / MANIFEST).is_file():
        return Candidates([path], path, needed=True)
    return replace(_all_in(path / FOLDER if (path / FOLDER).is_dir() else path), needed=True)


def _file_above(folder: Path) -> Path | None:
    """The file that keeps a folder from being made."""
    return next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None)


def _all_in(root: Path) -> Candidates:
    found = steps(root)
    passed_over = [f"{path.name}: a run ended while it was written or deleted" for path in leftovers(root)]
    target = pointed_to(root)
    if target is not None and not (root / target).is_dir():
        passed_over.append(f"{target}: the pointer {root / LATEST} names it, but it is not there")
    return Candidates(list(found.values()), root, passed_over, needed=bool(found) or target is not None)


def choose(resume: str, root: Path) -> Path | None:
    """The newest sound checkpoint, every byte of it verified, or None for a fresh start; a collective call.

    Raises:
        CheckpointError: there is none and a fresh start was not asked for; the same on every rank.
    """
    outcome: Candidates | list[str]
    try:
        outcome = candidates(resume, root) if dist.get_rank() == 0 else Candidates()
    except ConfigError as error:
        outcome = list(error.violations)
    except OSError as error:
        outcome = [f"hybrid.training.resume is {resume}, but {error.filename} cannot be read: {error.strerror}"]
    outcome = from_rank_zero(outcome)
    if isinstance(outcome, list):
        raise CheckpointError(outcome)
    passed_over = list(outcome.passed_over)
    for path in outcome.paths:
        problems = verify(path)
        if not problems:
            _say(passed_over)
            return path
        passed_over.append(f"{path.name}: {'; '.join(problems)}")
    if outcome.needed:
        raise _nothing_sound(resume, outcome.folder, passed_over)
    _say(passed_over)
    return None


def _nothing_sound(resume: str, folder: Path, passed_over: list[str]) -> CheckpointError:
    remedy = "name the folder of one, or of a run that has one, or start afresh with --resume none"
    if not passed_over:
        return CheckpointError([f"hybrid.training.resume is {resume}, but {folder} holds no checkpoint: {remedy}"])
    where = f"{folder}, which holds no sound checkpoint (hybrid.training.resume is {resume})"
    return CheckpointError(passed_over, where, f"To go on, {remedy}.")


def _say(passed_over: list[str]) -> None:
    if dist.get_rank() == 0:
        for reason in passed_over:
            logger.warning("passed over checkpoint %s", reason)


def verify(path: Path) -> list[str]:
    """What is wrong with a checkpoint, the ranks sharing the reading; a collective call, the same on every rank."""
    outcome: Manifest | list[str] = []
    if dist.get_rank() == 0:
        outcome = _manifest_or_problems(path)
    outcome = from_rank_zero(outcome)
    if not isinstance(outcome, Manifest):
        return outcome
    by_size = sorted(outcome.files, key=lambda name: (-outcome.files[name].size, name))
    mine = {name: outcome.files[name] for name in by_size[dist.get_rank() :: dist.get_world_size()]}
    try:
        found = checksum_problems(path, replace(outcome, files=mine))
    except OSError as error:
        found = [str(error)]
    problems = [problem for problems in everyone(found) for problem in problems]
    return [listed(problems)] if problems else []


def _manifest_or_problems(path: Path) -> Manifest | list[str]:
    try:
        if not (path / MANIFEST).is_file():
            return [f"it has no {MANIFEST}, so it was never completed"]
        manifest = read_manifest(path)
        return file_problems(path, manifest) or manifest
    except ConfigError as error:
        return list(error.violations)
    except OSError as error:
        return [str(error)]
