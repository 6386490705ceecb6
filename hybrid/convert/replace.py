"""What `--overwrite` may replace: a folder with a model and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from hybrid.convert.errors import CheckpointError
from hybrid.convert.files import COMPANIONS

_WEIGHTS = (
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model-*.bin",
    "pytorch_model.bin.index.json",
    "layer_*-model_*-model_states.pt",
)

_DOCUMENTS = ("README.md", "LICENSE*", "NOTICE*", "USE_POLICY.md", ".gitattributes")

_KNOWN = ("config.json", "manifest.json", *_WEIGHTS, *COMPANIONS, *_DOCUMENTS)

_SHOWN = 5


def check_replaceable(output: Path, source: Path) -> None:
    """Whether a folder may be replaced by what is made of `source`; a folder that is not there or empty may.

    A training checkpoint is no such folder: a converted model has no optimizer states to put in their place.

    Raises:
        CheckpointError: it is the source, in it or around it, or something else than a model would be lost.
    """
    place, origin = output.resolve(), source.resolve()
    if place == origin or place in origin.parents or origin in place.parents:
        relation = "is" if place == origin else "contains" if place in origin.parents else "lies in"
        raise CheckpointError(
            [f"it {relation} the source {source}, which --overwrite must not touch: choose another folder"], str(output)
        )
    if output.is_symlink():
        raise CheckpointError([f"it is a link: name the folder it leads to, {place}, for --overwrite"], str(output))
    if not output.exists():
        return
    if not output.is_dir():
        raise CheckpointError(["it is a file, and --overwrite replaces folders: choose another name"], str(output))
    entries = sorted(path.name for path in output.iterdir())
    foreign = list(_foreign(output))
    rule = "--overwrite replaces a folder only if it holds a model and nothing else"
    if foreign:
        shown = ", ".join(foreign[:_SHOWN]) + (f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else "")
        raise CheckpointError(
            [f"{rule}; no files of a model are {shown}: move them away, or choose another folder"], str(output)
        )
    whole = "config.json" in entries and any(fnmatchcase(name, weights) for name in entries for weights in _WEIGHTS)
    if entries and not whole:
        raise CheckpointError(
            [f"{rule}, but it has no config.json with weights beside it: remove it yourself, or choose another folder"],
            str(output),
        )


def _foreign(folder: Path) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name not in COMPANIONS or path.is_symlink():
                yield f"{path.name}/"
            else:
                templates = sorted(path.iterdir())
                yield from (f"{path.name}/{e.name}" for e in templates if e.is_dir() or e.suffix != ".jinja")
        elif not any(fnmatchcase(path.name, pattern) for pattern in _KNOWN):
            yield path.name
