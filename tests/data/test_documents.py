"""Reading text: what is accepted, what is skipped and counted, and faults named by file and line."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.data import documents, sources
from hybrid.data.documents import read_unit
from hybrid.data.sources import Unit, plan_units, source_state


def texts(source: Path | str, text_key: str = "text", skipped: Counter[str] | None = None) -> list[str]:
    found, held = [], ""
    for unit in plan_units(str(source)):
        for piece in read_unit(unit, text_key, Counter() if skipped is None else skipped):
            held += piece.text
            if piece.ends_document:
                found.append(held)
                held = ""
    assert held == "", "every document is ended"
    return found


def rows(*values: str) -> bytes:
    return "".join(json.dumps({"text": value}) + "\n" for value in values).encode()


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"\xef\xbb\xbf" + rows("a", "b"), ["a", "b"]),
        (rows("a", "b").replace(b"\n", b"\r\n"), ["a", "b"]),
        (b"\n" + rows("a") + b"\n  \r\n\n" + rows("b"), ["a", "b"]),
        (rows("a", "b").rstrip(b"\n"), ["a", "b"]),
        ('{"text": "one\u2028two\u2029\x85"}\n{"text": "b"}'.encode(), ["one\u2028two\u2029\x85", "b"]),
        (b"\xef\xbb\xbf\r\n" + rows("a"), ["a"]),
        (b'{"id": 1, "text": "a\\nb", "meta": {"text": "no"}}', ["a\nb"]),
        (rows("a", "\U0001f600 \x00"), ["a", "\U0001f600 \x00"]),
    ],
    ids=["bom", "crlf", "blank-lines", "no-final-newline", "separators", "bom-alone", "other-keys", "odd-characters"],
)
def test_jsonl_forms_that_are_accepted(tmp_path: Path, raw: bytes, expected: list[str]) -> None:
    (tmp_path / "d.jsonl").write_bytes(raw)
    assert texts(tmp_path / "d.jsonl") == expected


def test_empty_text_is_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(rows("", "a", "", " "))
    skipped: Counter[str] = Counter()
    assert texts(tmp_path / "d.jsonl", skipped=skipped) == ["a", " "]
    assert skipped == {documents.EMPTY: 2}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"null", "found null"),
        (b'{"text": "a"} {"text": "b"}', "more than one JSON value on the line at column 15"),
        (b'{"text": "a\xff"}', "not UTF-8: byte 0xff at column 12"),
        (b'{"text": "a\x01"}', "Invalid control character at column 12"),
        (b'{"body": "a"}', r"no key 'text' among \['body'\]; name the right one with --set hybrid.data.text_key=NAME"),
        (b'{"text": null}', "'text' is null; it must be a string"),
        (b'{"text": 3}', "'text' is a number"),
        (b'["a"]', "found an array"),
        (b'{"text": "a"', "at column"),
        (b'{"text": "\\ud800"}', "unpaired surrogate at character 1"),
    ],
)
def test_jsonl_faults_name_file_and_line(tmp_path: Path, bad: bytes, message: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + rows("a") + b"\r\n" + bad + b"\n" + rows("b"))
    with pytest.raises(ValueError, match=rf"d\.jsonl:3: .*{message}"):
        texts(path)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=12), size=st.integers(1, 40)
)
def test_byte_ranges_hold_every_line_once(
    values: list[str], size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("d") / "d.jsonl"
    path.write_bytes(rows(*values))
    found = [piece.text for unit in sources._file_units(path, size) for piece in read_unit(unit, "text", Counter())]
    assert found == [value for value in values if value]


@pytest.mark.parametrize("size", [1, 7, 13, 30, 1000])
def test_a_fault_in_a_later_range_has_the_files_line_number(tmp_path: Path, size: int) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(rows("a", "bb", "ccc") + b"null\n" + rows("d"))
    with pytest.raises(ValueError, match=r"d\.jsonl:4: found null"):
        for unit in sources._file_units(path, size):
            list(read_unit(unit, "text", Counter()))


def test_compressed_files(tmp_path: Path) -> None:
    raw = rows("a", "b\u2028c", "d" * 5000)
    (tmp_path / "1.jsonl.gz").write_bytes(gzip.compress(raw[:20]) + gzip.compress(raw[20:]))
    compressed = [bytes(pyarrow.compress(part, codec="zstd")) for part in (raw[:20], raw[20:])]
    (tmp_path / "2.jsonl.zst").write_bytes(b"".join(compressed))
    (tmp_path / "3.txt.gz").write_bytes(gzip.compress(b"plain\ntext\n"))
    assert texts(tmp_path) == ["a", "b\u2028c", "d" * 5000] * 2 + ["plain\ntext\n"]
    for name in ("1.jsonl.gz", "2.jsonl.zst"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[:-10])
        with pytest.raises(ValueError, match=name):
            texts(tmp_path / name)


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    path.write_bytes("\ufeffone\r\ntwo\u2028\n\nthree".encode())
    assert texts(path) == ["one\r\ntwo\u2028\n\nthree"]
    skipped: Counter[str] = Counter()
    path.write_bytes(b"")
    assert texts(path, skipped=skipped) == [] and skipped == {documents.EMPTY: 1}
    path.write_bytes(b"one\ntwo\nthr\xffee\n")
    with pytest.raises(ValueError, match=r"d\.txt:3: not UTF-8: byte 0xff"):
        texts(path)


@pytest.mark.parametrize("text", ["ab\ncd\n", "ab\ncd", "no newline but spaces", "x" * 50, "日本語" * 20, "a\n" * 30])
@pytest.mark.parametrize("piece", [4, 5, 16])
def test_a_long_text_file_is_read_in_pieces(
    tmp_path: Path, text: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_PIECE", piece)
    (tmp_path / "d.txt").write_text(text, encoding="utf-8")
    assert texts(tmp_path / "d.txt") == [text]
    pieces = list(read_unit(Unit(kind="txt", path=str(tmp_path / "d.txt")), "text", Counter()))
    assert [p.ends_document for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "\ufffd" not in "".join(p.text for p in pieces)


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d.parquet"
    values = [f"text {i}" for i in range(50)]
    table = pyarrow.table({"body": [*values, ""], "n": list(range(51))})
    pyarrow.parquet.write_table(table, path, row_group_size=7)
    monkeypatch.setattr(sources, "_SMALLEST_UNIT", 1)
    assert len(plan_units(str(path))) == 8
    assert texts(path, "body") == values
    with pytest.raises(ValueError, match=r"no column 'text' among \['body', 'n'\]"):
        texts(path)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b", None]}), path, row_group_size=1)
    with pytest.raises(ValueError, match=r"d\.parquet:3: 'text' is null"):
        texts(path)
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match=r"d\.parquet"):
        texts(path)


def test_a_saved_hugging_face_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_DATASET_ROWS", 4)
    values = [f"text {i}" for i in range(10)]
    train = datasets.Dataset.from_dict({"text": values})
    train.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": train, "test": train.select([3])}).save_to_disk(str(tmp_path / "dict"))
    assert texts(tmp_path / "one") == values
    assert [unit.stop for unit in plan_units(str(tmp_path / "one"))] == [4, 8, 10]
    assert texts(tmp_path / "dict") == values
    (unit,) = plan_units(str(tmp_path / "dict"), "test")
    assert [piece.text for piece in read_unit(unit, "text", Counter())] == ["text 3"]
    with pytest.raises(ValueError, match=r"no split 'dev'; it has \['test', 'train'\]"):
        plan_units(str(tmp_path / "dict"), "dev")


def test_a_streamed_dataset_is_read_by_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [f"text {i}" for i in range(10)]
    stream = datasets.Dataset.from_dict({"text": [*values, None]}).to_iterable_dataset(num_shards=3)
    monkeypatch.setattr(sources, "open_dataset", lambda name, split: stream)
    monkeypatch.setattr(documents, "open_dataset", lambda name, split: stream)
    units = plan_units("owner/name")
    assert [(unit.start, unit.streamed) for unit in units] == [(0, True), (1, True), (2, True)]
    found = [piece.text for unit in units[:2] for piece in read_unit(unit, "text", Counter())]
    assert found == values[: len(found)]
    with pytest.raises(ValueError, match="owner/name shard 2:3: 'text' is null"):
        list(read_unit(units[2], "text", Counter()))


def test_folders_and_globs_are_read_in_order_of_name(tmp_path: Path) -> None:
    for name in ("b", "a", "sub/c"):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(rows(name))
    (tmp_path / "notes.md").write_text("not data")
    assert texts(tmp_path) == ["a", "b", "sub/c"]
    assert texts(tmp_path / "*.jsonl") == ["a", "b"]
    assert texts(f"{tmp_path}/**/*.jsonl") == ["a", "b", "sub/c"]
    before = source_state(str(tmp_path))
    (tmp_path / "a.jsonl").write_bytes(rows("aa"))
    assert source_state(str(tmp_path)) != before


@pytest.mark.parametrize("name", ["missing.jsonl", "missing*.jsonl", "d.csv", "empty", "no-such-dataset"])
def test_sources_that_do_not_exist_are_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d.csv").write_text("text\na\n")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"data source '{name}'".replace("*", r"\*")):
        plan_units(name)
