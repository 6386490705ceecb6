"""Where text comes from: which pieces of work a source is cut into, and the documents of each.

A unit is a part of a source that one process reads by itself: a byte range of a JSONL file, a compressed file, some
row groups of a parquet file, a range of a dataset's rows. The units of a source depend on nothing but the source, so
an interrupted preparation finds the same ones again, whatever the number of workers.
"""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hybrid.data.tokenizer import DEMO

Kind = Literal["demo", "jsonl", "txt", "parquet", "dataset"]
_SUFFIXES: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "txt",
    ".parquet": "parquet",
}
_COMPRESSIONS = (".gz", ".zst")
_SMALLEST_UNIT, _LARGEST_UNIT, _USUAL_UNITS = 4 << 20, 256 << 20, 1024
_DATASET_ROWS = 10_000
_ACCEPTED = (
    "a .jsonl, .json, .ndjson or .txt file (also .gz, .zst), a .parquet file, a folder or glob of these, "
    "a Hugging Face dataset, or 'demo'"
)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A part of a source: `[start, stop)` in bytes, row groups, rows or shards, by kind; `stop` 0 means all."""

    kind: Kind
    path: str
    start: int = 0
    stop: int = 0
    split: str = "train"
    """Of a Hugging Face dataset."""
    streamed: bool = False
    """A Hugging Face dataset read by name: the range counts its shards."""

    @property
    def compression(self) -> str:
        suffix = Path(self.path).suffix
        return suffix if suffix in _COMPRESSIONS else ""


def plan_units(source: str, split: str = "train") -> list[Unit]:
    """The units of a source, in the order of its documents.

    Raises:
        ValueError: the source does not exist, is of no known kind, or is empty.
    """
    if source == DEMO:
        return [Unit(kind="demo", path=DEMO)]
    path = Path(source)
    if path.is_dir() and _is_saved_dataset(path):
        return _dataset_units(source, split)
    files = _files(source)
    if not files and not path.exists() and not glob.has_magic(source) and path.suffix == "":
        return _dataset_units(source, split)
    if not files:
        raise ValueError(f"data source {source!r} has no file to read; give {_ACCEPTED}")
    total = sum(file.stat().st_size for file in files)
    size = min(max(total // _USUAL_UNITS, _SMALLEST_UNIT), _LARGEST_UNIT)
    units = [unit for file in files for unit in _file_units(file, size)]
    if not units:
        raise ValueError(f"data source {source!r} is empty: give one that holds rows or text")
    return units


def source_state(source: str) -> list[tuple[str, int, int]]:
    """Path, size and modification time of all that a source reads: what a cache is keyed by."""
    path = Path(source)
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else _files(source)
    return [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def kind_of(path: Path) -> Kind | None:
    """The kind of a file by its name, None if it is of no known kind."""
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes = suffixes[:-1]
        return None if suffixes and suffixes[-1] == ".parquet" else _SUFFIXES.get(suffixes[-1]) if suffixes else None
    return _SUFFIXES.get(suffixes[-1]) if suffixes else None


def _files(source: str) -> list[Path]:
    """The readable files of a path, a folder or a glob, sorted by name."""
    path = Path(source)
    if path.is_file():
        if kind_of(path) is None:
            raise ValueError(f"data source {source!r} is a file of no known kind; give {_ACCEPTED}")
        return [path]
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.is_file() and kind_of(p))
    if glob.has_magic(source):
        return sorted(p for p in map(Path, glob.glob(source, recursive=True)) if p.is_file() and kind_of(p))
    return []


def _file_units(path: Path, size: int) -> list[Unit]:
    kind = kind_of(path)
    assert kind is not None, "_files keeps only files of a known kind"
    if kind == "parquet":
        return _parquet_units(path, size)
    if kind == "txt" or path.suffix in _COMPRESSIONS:
        return [Unit(kind=kind, path=str(path))]
    length = path.stat().st_size
    return [
        Unit(kind=kind, path=str(path), start=start, stop=min(start + size, length)) for start in range(0, length, size)
    ]


def _parquet_units(path: Path, size: int) -> list[Unit]:
    import pyarrow.parquet as parquet

    try:
        metadata = parquet.ParquetFile(path).metadata
    except ValueError as error:  # Arrow's errors do not say which file
        raise ValueError(f"{path}: cannot be read: {error}") from error
    units, start, held = [], 0, 0
    for group in range(metadata.num_row_groups):
        held += metadata.row_group(group).total_byte_size
        if held >= size or group == metadata.num_row_groups - 1:
            units.append(Unit(kind="parquet", path=str(path), start=start, stop=group + 1))
            start, held = group + 1, 0
    return units


def _is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()


def _dataset_units(name: str, split: str) -> list[Unit]:
    dataset = open_dataset(name, split)
    if hasattr(dataset, "num_rows"):
        rows = dataset.num_rows
        return [
            Unit(kind="dataset", path=name, start=start, stop=min(start + _DATASET_ROWS, rows), split=split)
            for start in range(0, rows, _DATASET_ROWS)
        ]
    return [
        Unit(kind="dataset", path=name, start=shard, stop=shard + 1, split=split, streamed=True)
        for shard in range(dataset.num_shards)
    ]


def open_dataset(name: str, split: str) -> Any:
    """A Hugging Face dataset: a folder that `save_to_disk` wrote, or a name, streamed.

    Raises:
        ValueError: there is no such dataset or split.
    """
    import datasets

    if Path(name).is_dir():
        found = datasets.load_from_disk(name)
        if isinstance(found, datasets.DatasetDict):
            if split not in found:
                raise ValueError(f"dataset {name!r} has no split {split!r}; it has {sorted(found)}")
            return found[split]
        return found
    try:
        return datasets.load_dataset(name, split=split, streaming=True)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"data source {name!r} is no file, no folder and no dataset within reach: {error}") from error
