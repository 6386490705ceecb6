"""The documents of one unit of a source, with every fault named by file and line."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hybrid.data.sources import Kind, Unit, open_dataset
from hybrid.data.tokenizer import demo_texts

_PIECE = 4 << 20
_ROWS = 256
EMPTY = "empty text"
"""Why a document without text is skipped."""
_NAME_IT = "name the right one with --set hybrid.data.text_key=NAME, or --text_key NAME of prepare_data.py"


class Piece(NamedTuple):
    """A document's text, or a part of it where the document is too long to hold at once."""

    text: str
    ends_document: bool = True


def read_unit(unit: Unit, text_key: str, skipped: Counter[str]) -> Iterator[Piece]:
    """The documents of a unit, in order. Documents without text are left out and counted in `skipped`.

    Raises:
        ValueError: a fault in the input, named as `file:line` (or `file:row`).
    """
    try:
        for piece in _READERS[unit.kind](unit, text_key):
            if piece.text:
                yield piece
            else:
                skipped[EMPTY] += 1
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{unit.path}: cannot be read to its end: {error}") from error
    except ValueError as error:
        # Arrow's own errors are ValueErrors that do not say which file.
        if unit.path in str(error):
            raise
        raise ValueError(f"{unit.path}: cannot be read: {error}") from error


def _read_demo(unit: Unit, text_key: str) -> Iterator[Piece]:
    return map(Piece, demo_texts())


def _open(unit: Unit) -> BinaryIO:
    if unit.compression == ".gz":
        return gzip.open(unit.path, "rb")  # type: ignore[return-value]
    if unit.compression == ".zst":
        import pyarrow

        stream: Any = pyarrow.CompressedInputStream(pyarrow.OSFile(unit.path), "zstd")
        return io.BufferedReader(stream, 1 << 20)
    return open(unit.path, "rb")


def numbered_lines(unit: Unit) -> Iterator[tuple[int, bytes]]:
    """(line number from the unit's start, line). A line belongs to the unit that holds its first byte."""
    with _open(unit) as file:
        position = unit.start
        if position:
            file.seek(position - 1)
            position += len(file.readline()) - 1
        number = 0
        while not unit.stop or position < unit.stop:
            line = file.readline()
            if not line:
                return
            number += 1
            yield number, line.removeprefix(codecs.BOM_UTF8) if position == 0 else line
            position += len(line)


def line_number(unit: Unit, number: int) -> int:
    """Line number in the file of the unit's line `number`: counted only when a fault is reported."""
    if unit.start == 0:
        return number
    # The line that crosses the start belongs to the unit before, hence the 1.
    before, rest = 1, unit.start - 1
    with _open(unit) as file:
        while rest:
            chunk = file.read(min(rest, 1 << 20))
            before += chunk.count(b"\n")
            rest -= len(chunk)
    return before + number


def _read_jsonl(unit: Unit, text_key: str) -> Iterator[Piece]:
    for number, line in numbered_lines(unit):
        if not line.strip():
            continue
        try:
            yield Piece(_text_of(line, text_key))
        except ValueError as error:
            raise ValueError(f"{unit.path}:{line_number(unit, number)}: {error}") from error


def parse_row(line: bytes) -> dict[str, Any]:
    """The JSON object of a line.

    Raises:
        ValueError: it is not one, and only one; says what it is.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        byte, column = line[error.start], error.start + 1
        raise ValueError(f"not UTF-8: byte {byte:#04x} at column {column}; re-encode the file") from error
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        found = "more than one JSON value on the line" if error.msg == "Extra data" else error.msg.removesuffix(" at")
        raise ValueError(f"{found} at column {error.colno}; each line is one JSON object") from error
    if not isinstance(row, dict):
        raise ValueError(f"found {json_type(row)}; each line is one JSON object")
    return row


def _text_of(line: bytes, text_key: str) -> str:
    row = parse_row(line)
    if text_key not in row:
        raise ValueError(f"no key {text_key!r} among {sorted(row)}; {_NAME_IT}")
    return checked_text(row[text_key], text_key)


def json_type(value: Any) -> str:
    """What JSON calls a value, for messages."""
    for kind, name in ((bool, "a boolean"), ((int, float), "a number"), (str, "a string"), (list, "an array")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "an object"


def checked_text(value: Any, text_key: str) -> str:
    """`value` if it is text a tokenizer takes.

    Raises:
        ValueError: it is no string, or holds half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise ValueError(f"{text_key!r} is {json_type(value)}; it must be a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        place = error.start + 1
        raise ValueError(f"{text_key!r} holds an unpaired surrogate at character {place}; mend the text") from error
    return value


def _read_txt(unit: Unit, text_key: str) -> Iterator[Piece]:
    """A text file is one document, given in pieces where it is long."""
    pieces = _text_pieces(unit)
    held = next(pieces, "")
    for piece in pieces:
        yield Piece(held, ends_document=False)
        held = piece
    yield Piece(held)


def _text_pieces(unit: Unit) -> Iterator[str]:
    number, rest, first = 1, b"", True
    with _open(unit) as file:
        while True:
            chunk = file.read(_PIECE)
            held = (rest + chunk).removeprefix(codecs.BOM_UTF8) if first else rest + chunk
            first = False
            cut = _cut(held) if chunk else len(held)
            try:
                text = held[:cut].decode("utf-8")
            except UnicodeDecodeError as error:
                line = number + held.count(b"\n", 0, error.start)
                where = f"{unit.path}:{line}"
                raise ValueError(f"{where}: not UTF-8: byte {held[error.start]:#04x}; re-encode the file") from error
            if text:
                yield text
            if not chunk:
                return
            number += held.count(b"\n", 0, cut)
            rest = held[cut:]


def _cut(held: bytes) -> int:
    """Where to end a piece: after the last line, else the last word, else before the last character."""
    cut = held.rfind(b"\n") + 1 or held.rfind(b" ") + 1
    if cut:
        return cut
    leads = [i for i in range(max(0, len(held) - 4), len(held)) if held[i] & 0xC0 != 0x80]
    return leads[-1] if leads else 0


def _read_parquet(unit: Unit, text_key: str) -> Iterator[Piece]:
    import pyarrow.parquet as parquet

    file = parquet.ParquetFile(unit.path)
    if text_key not in file.schema_arrow.names:
        raise ValueError(_no_column(unit, text_key, file.schema_arrow.names))
    row = sum(file.metadata.row_group(group).num_rows for group in range(unit.start))
    for batch in file.iter_batches(_ROWS, row_groups=list(range(unit.start, unit.stop)), columns=[text_key]):
        for value in batch.column(0).to_pylist():
            row += 1
            yield Piece(_row_text(value, text_key, f"{unit.path}:{row}"))


def _no_column(unit: Unit, text_key: str, names: Sequence[str]) -> str:
    return f"{unit.path}: no column {text_key!r} among {list(names)}; {_NAME_IT}"


def _row_text(value: Any, text_key: str, where: str) -> str:
    try:
        return checked_text(value, text_key)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _read_dataset(unit: Unit, text_key: str) -> Iterator[Piece]:
    dataset = open_dataset(unit.path, unit.split)
    names = dataset.column_names
    if names is not None and text_key not in names:
        raise ValueError(_no_column(unit, text_key, names))
    if unit.streamed:
        dataset = dataset.shard(num_shards=dataset.num_shards, index=unit.start)
        rows: Iterator[dict[str, Any]] = iter(dataset)
    else:
        rows = iter(dataset.select_columns([text_key]).select(range(unit.start, unit.stop)))
    first = 1 if unit.streamed else unit.start + 1
    place = f"{Path(unit.path)} shard {unit.start}" if unit.streamed else unit.path
    for number, row in enumerate(rows, first):
        yield Piece(_row_text(row[text_key], text_key, f"{place}:{number}"))


_READERS: dict[Kind, Callable[[Unit, str], Iterator[Piece]]] = {
    "demo": _read_demo,
    "jsonl": _read_jsonl,
    "txt": _read_txt,
    "parquet": _read_parquet,
    "dataset": _read_dataset,
}
