"""The rows of fine-tuning data, each with the place it stands at."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hybrid.data.documents import json_type, line_number, numbered_lines, parse_row
from hybrid.data.sources import Unit, open_dataset, plan_units

_BATCH = 256


class Row(NamedTuple):
    """One object of the data."""

    where: str
    """`file:line`, or `file: item 3`, `file: row 3` where there are no lines; counted from 1."""
    fields: dict[str, Any]


def read_rows(source: str, split: str = "train") -> Iterator[Row]:
    """The rows of a .jsonl or .json file (lines, or one array), a .parquet file, a folder or glob of these, or a
    Hugging Face dataset, in order.

    Raises:
        ValueError: there is no such source, or a row is not an object; names file and line.
    """
    for unit in plan_units(source, split):
        if unit.kind in ("demo", "txt"):
            raise ValueError(f"{unit.path}: plain text holds no conversations; give .jsonl, .json or .parquet rows")
        yield from _READERS[unit.kind](unit)


def _read_json(unit: Unit) -> Iterator[Row]:
    if not unit.compression and _is_array(Path(unit.path)):
        if unit.start == 0:
            yield from _read_array(Path(unit.path))
        return
    for number, line in numbered_lines(unit):
        if not line.strip():
            continue
        try:
            fields = parse_row(line)
        except ValueError as error:
            raise ValueError(f"{unit.path}:{line_number(unit, number)}: {error}") from error
        yield Row(f"{unit.path}:{line_number(unit, number)}", fields)


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1 << 10).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _read_array(path: Path) -> Iterator[Row]:
    try:
        items = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: {error.msg.removesuffix(' at')} at column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}; re-encode the file") from error
    for number, item in enumerate(items, start=1):
        where = f"{path}: item {number}"
        if not isinstance(item, dict):
            raise ValueError(f"{where}: found {json_type(item)}; each item is one JSON object")
        yield Row(where, item)


def _read_parquet(unit: Unit) -> Iterator[Row]:
    import pyarrow.parquet as parquet

    file = parquet.ParquetFile(unit.path)
    number = sum(file.metadata.row_group(group).num_rows for group in range(unit.start))
    for batch in file.iter_batches(_BATCH, row_groups=list(range(unit.start, unit.stop))):
        for fields in batch.to_pylist():
            number += 1
            yield Row(f"{unit.path}: row {number}", fields)


def _read_dataset(unit: Unit) -> Iterator[Row]:
    dataset = open_dataset(unit.path, unit.split)
    if unit.streamed:
        rows, first = iter(dataset.shard(num_shards=dataset.num_shards, index=unit.start)), 1
        place = f"{unit.path} shard {unit.start}"
    else:
        rows, first, place = iter(dataset.select(range(unit.start, unit.stop))), unit.start + 1, unit.path
    for number, fields in enumerate(rows, first):
        yield Row(f"{place}: row {number}", fields)


_READERS = {"jsonl": _read_json, "parquet": _read_parquet, "dataset": _read_dataset}


def short_place(where: str) -> str:
    """A row's place without the folder, for lists of rows."""
    return os.path.basename(where)
