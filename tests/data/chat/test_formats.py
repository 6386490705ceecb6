"""The formats, their detection, and rows that are none of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from hybrid.data.chat.formats import detect_format, parse_conversation
from hybrid.data.chat.rows import read_rows

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}

ROWS: dict[str, list[tuple[dict[str, Any], list[dict[str, Any]]]]] = {
    "messages": [
        ({"messages": [USER, ANSWER], "prompt": "unused"}, [USER, ANSWER]),
        ({"messages": [{**USER, "content": [{"type": "text", "text": "q"}], "name": None}, ANSWER]}, [USER, ANSWER]),
    ],
    "prompt_completion": [
        ({"prompt": "q", "completion": "a"}, [USER, ANSWER]),
        ({"prompt": [USER], "completion": [ANSWER]}, [USER, ANSWER]),
        ({"prompt": "q", "completion": "a", "system": "s"}, [{"role": "system", "content": "s"}, USER, ANSWER]),
    ],
    "alpaca": [
        ({"instruction": "q", "input": "", "output": "a"}, [USER, ANSWER]),
        ({"instruction": "q", "output": "a"}, [USER, ANSWER]),
        ({"instruction": "q", "input": "i", "output": "a"}, [{**USER, "content": "q\n\ni"}, ANSWER]),
    ],
    "sharegpt": [
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, [USER, ANSWER]),
        ({"conversations": [USER, ANSWER]}, [USER, ANSWER]),
    ],
}


@pytest.mark.parametrize("name", ROWS)
def test_every_format_becomes_messages(name: str) -> None:
    for fields, expected in ROWS[name]:
        assert detect_format(fields, "here") == name
        found = parse_conversation(fields, name, "here")  # type: ignore[arg-type]
        assert [dict(message) for message in found.messages] == expected


def test_plain_text_of_prompts() -> None:
    pair = parse_conversation({"prompt": "q", "completion": "a"}, "prompt_completion", "here")
    assert pair.plain == ("q", "a")
    alpaca = parse_conversation({"instruction": "{x}", "input": "i", "output": "a"}, "alpaca", "here")
    assert alpaca.plain is not None
    assert "### Instruction:\n{x}\n\n### Input:\ni\n\n### Response:\n" in alpaca.plain[0]


@pytest.mark.parametrize(
    ("fields", "form", "message"),
    [
        ({"text": "x"}, None, r"a:3: no conversation among the keys \['text'\]"),
        ({"prompt": "x"}, "messages", r"a:3: no key 'messages' among \['prompt'\]"),
        ({"messages": "x"}, "messages", "'messages' is a string; it must be an array"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages", "message 1 has the role 'boss'; roles are"),
        ({"messages": [{"role": "user", "content": None}]}, "messages", "the content of message 1 is null"),
        ({"messages": [{"role": "user"}]}, "messages", "the content of message 1 is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "is a number; it must be a string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "not text"),
        ({"messages": ["x"]}, "messages", "message 1 is a string"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "unpaired surrogate"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "sharegpt", "turn 1 is from 'alien'; known are"),
        ({"conversations": [{"value": "x"}]}, "sharegpt", "turn 1 .* must be an object with from and value"),
        ({"conversations": [{"from": "gpt", "value": None}]}, "sharegpt", "the value of turn 1' is null"),
        ({"instruction": "x", "output": 3}, "alpaca", "'output' is a number"),
        ({"messages": [USER], "tools": "{"}, "messages", "'tools' is a string that is not JSON"),
    ],
)
def test_faulty_rows_are_named(fields: dict[str, Any], form: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_conversation(fields, form or detect_format(fields, "a:3"), "a:3")
    assert str(caught.value).startswith("a:3: ")


def test_lines_as_editors_write_them(tmp_path: Path) -> None:
    """BOM, CRLF, blank lines, no final newline, and a line separator inside a text."""
    path = tmp_path / "rows.jsonl"
    row = json.dumps({"prompt": "a\u2028b", "completion": "c"}, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + f"{row}\r\n\r\n  \n{row}".encode())
    found = list(read_rows(str(path)))
    assert [row.where for row in found] == [f"{path}:1", f"{path}:4"]
    assert all(row.fields["prompt"] == "a\u2028b" for row in found)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("null", "found null"),
        ('{"a": 1} {"a": 2}', "more than one JSON value"),
        ("{", "rows.jsonl:2: "),
        ("[]", "array"),
    ],
)
def test_faulty_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=message) as caught:
        list(read_rows(str(path)))
    assert f"{path}:2" in str(caught.value)


def test_arrays_compressed_files_and_tables(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "completion": "c"} for i in range(3)]
    (tmp_path / "array.json").write_text(json.dumps(rows, indent=1))
    with gzip.open(tmp_path / "lines.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "table.parquet")
    for name, place in (("array.json", ": item 3"), ("lines.jsonl.gz", ":3"), ("table.parquet", ": row 3")):
        found = list(read_rows(str(tmp_path / name)))
        assert [row.fields for row in found] == rows
        assert found[-1].where == f"{tmp_path / name}{place}"
    assert len(list(read_rows(str(tmp_path)))) == 9
    (tmp_path / "bad.json").write_text("[1]")
    with pytest.raises(ValueError, match="bad.json: item 1: found a number"):
        list(read_rows(str(tmp_path / "bad.json")))
    (tmp_path / "text.txt").write_text("hello")
    with pytest.raises(ValueError, match="plain text holds no conversations"):
        list(read_rows(str(tmp_path / "text.txt")))


def test_a_hugging_face_dataset(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list([{"messages": [USER, ANSWER]}] * 2).save_to_disk(str(tmp_path / "set"))
    found = list(read_rows(str(tmp_path / "set")))
    assert [row.where for row in found] == [f"{tmp_path / 'set'}: row 1", f"{tmp_path / 'set'}: row 2"]
    assert detect_format(found[0].fields, "x") == "messages"
