"""The checkpoints of a run on disk: complete ones, the pointer to the latest, what is kept, what a killed run left.

checkpoints/latest                    one line, the name of the newest complete checkpoint
checkpoints/step-00000020/            complete: its manifest was written last, then it got this name
checkpoints/.step-00000030.writing/   being written, or left behind by a run that was killed
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from hybrid.convert.files import sync
from hybrid.convert.manifest import MANIFEST

FOLDER = "checkpoints"
"""Name of the folder in a run's folder."""

LATEST = "latest"

_STEP = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"\.step-\d+\.(writing|deleting)")


def step_name(step: int) -> str:
    """A checkpoint's name."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step a folder's name says, or None if it is no checkpoint's."""
    found = _STEP.fullmatch(path.name)
    return int(found[1]) if found and path.is_dir() else None


def steps(root: Path) -> dict[int, Path]:
    """Every folder with a checkpoint's name, newest first."""
    paths = list(root.iterdir()) if root.is_dir() else []
    found = {step: path for path in paths if (step := step_of(path)) is not None}
    return dict(sorted(found.items(), reverse=True))


def staging_folder(root: Path, step: int) -> Path:
    """Where a checkpoint is written."""
    return root / f".{step_name(step)}.writing"


def leftovers(root: Path) -> list[Path]:
    """What killed runs were writing or deleting."""
    return sorted(path for path in root.iterdir() if _LEFTOVER.fullmatch(path.name)) if root.is_dir() else []


def begin(root: Path, step: int) -> Path:
    """An empty staging folder."""
    staging = staging_folder(root, step)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    return staging


def commit(root: Path, step: int, manifest: str) -> Path:
    """Make the staged checkpoint of a step the run's latest; all its files are on disk. One process does it."""
    staging, final = staging_folder(root, step), root / step_name(step)
    write_durably(staging / MANIFEST, manifest)
    sync(staging)
    staging.rename(final)
    sync(root)
    point_to(root, final.name)
    return final


def point_to(root: Path, name: str) -> None:
    """Let `latest` name a checkpoint."""
    temporary = root / f".{LATEST}.writing"
    write_durably(temporary, f"{name}\n")
    os.replace(temporary, root / LATEST)
    sync(root)


def write_durably(path: Path, text: str) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def pointed_to(root: Path) -> str | None:
    """The name in `latest`, or None without one."""
    try:
        return (root / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None


def remove(path: Path) -> None:
    """Delete a checkpoint; a kill half-way leaves nothing that looks like one."""
    condemned = path.with_name(f".{path.name}.deleting")
    shutil.rmtree(condemned, ignore_errors=True)
    path.rename(condemned)
    shutil.rmtree(condemned)


def retained(found: Iterable[int], keep_last: int, keep_every: int) -> set[int]:
    """The steps that stay: the newest `keep_last` (0: all), and the multiples of `keep_every` (0: none of them)."""
    newest = sorted(found, reverse=True)
    if not keep_last:
        return set(newest)
    return {*newest[:keep_last], *(step for step in newest if keep_every and step % keep_every == 0)}


def prune(root: Path, keep_last: int, keep_every: int) -> list[Path]:
    """Delete complete checkpoints that need not stay; those that were deleted."""
    found = {step: path for step, path in steps(root).items() if (path / MANIFEST).is_file()}
    keep = retained(found, keep_last, keep_every)
    condemned = [path for step, path in found.items() if step not in keep]
    for path in condemned:
        remove(path)
    return condemned


def set_aside(root: Path, after: int) -> list[Path]:
    """Rename the checkpoints of later steps, which a run that goes on from `after` will write anew; their new names."""
    moved = []
    for step, path in steps(root).items():
        if step > after:
            number = 1
            while (target := root / f"unused-{path.name}-{number}").exists():
                number += 1
            path.rename(target)
            moved.append(target)
    if moved:
        remaining = steps(root)
        if remaining:
            point_to(root, next(iter(remaining.values())).name)
        else:
            (root / LATEST).unlink(missing_ok=True)
    return moved


def clean(root: Path) -> None:
    """Remove what killed runs were writing or deleting."""
    for path in leftovers(root):
        shutil.rmtree(path, ignore_errors=True)
