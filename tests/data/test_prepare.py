"""Tokenising: any number of workers gives the same files, an interrupted run goes on, faults leave nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hybrid.data import documents, prepare, sources
from hybrid.data.corpus import check_corpus, corpus_info, read_info, scan
from hybrid.data.indexed import IndexedDataset, IndexedWriter, bin_path, exists, idx_path
from hybrid.data.prepare import Counts, TokenizeJob, prepare_corpus
from hybrid.data.sources import plan_units
from hybrid.data.tokenizer import load_tokenizer

LINES = [f"w{i % 7} w{i % 5 + 1} w{i}" for i in range(1, 60)]


@pytest.fixture
def job(tmp_path: Path, word_tokenizer: Callable[..., Path]) -> TokenizeJob:
    return TokenizeJob(tokenizer=str(word_tokenizer(tmp_path / "tokenizer", 100)), cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file that is cut into several units."""
    monkeypatch.setattr(sources, "_SMALLEST_UNIT", 300)
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES) + '{"text": ""}\n')
    assert len(plan_units(str(path))) > 4
    return str(path)


def files(prefix: Path) -> list[bytes]:
    return [bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes()]


def test_documents_end_with_the_end_token(source: str, job: TokenizeJob, tmp_path: Path) -> None:
    info = prepare_corpus(plan_units(source), job, tmp_path / "out", plan_key="k")
    dataset = IndexedDataset(tmp_path / "out")
    expected = [[int(word[1:]) for word in line.split()] + [0] for line in LINES]
    assert [dataset.read(i).tolist() for i in range(len(dataset))] == expected
    assert dataset.dtype == np.uint16
    assert (info.documents, info.tokens, info.largest_id) == (59, 59 * 4, 59)
    assert info.skipped == {documents.EMPTY: 1}
    assert info == read_info(tmp_path / "out")
    assert info.text_bytes == sum(map(len, LINES))
    assert load_tokenizer(tmp_path / "out.tokenizer", tmp_path).fingerprint == info.tokenizer.fingerprint
    assert not (tmp_path / "out.parts").exists()


def test_workers_do_not_change_the_files(source: str, job: TokenizeJob, tmp_path: Path) -> None:
    infos = [
        prepare_corpus(plan_units(source), job, tmp_path / f"out{workers}", plan_key="k", workers=workers)
        for workers in (1, 2)
    ]
    assert infos[0] == infos[1]
    assert files(tmp_path / "out1") == files(tmp_path / "out2")


def test_an_interrupted_run_goes_on(
    source: str, job: TokenizeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_corpus(plan_units(source), job, tmp_path / "whole", plan_key="k")
    made: list[int] = []
    tokenize = prepare._tokenize_part

    def interrupted(unit: sources.Unit, job: TokenizeJob, parts: Path, part: int) -> Counts:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(part)
        return tokenize(unit, job, parts, part)

    monkeypatch.setattr(prepare, "_tokenize_part", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(plan_units(source), job, tmp_path / "out", plan_key="k")
    assert not exists(tmp_path / "out")
    made = []
    monkeypatch.setattr(prepare, "_tokenize_part", lambda *a: made.append(a[3]) or tokenize(*a))
    seen: list[Counts] = []
    prepare_corpus(plan_units(source), job, tmp_path / "out", plan_key="k", progress=seen.append)
    assert made == list(range(2, len(plan_units(source))))
    assert sum(counts.documents for counts in seen) == 59
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_parts_of_another_plan_are_not_used(
    source: str, job: TokenizeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "merge", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(plan_units(source), job, tmp_path / "out", plan_key="k")
    monkeypatch.undo()
    other = TokenizeJob(tokenizer=job.tokenizer, cache_dir=job.cache_dir, append_eos=False)
    info = prepare_corpus(plan_units(source), other, tmp_path / "out", plan_key="k")
    assert info.tokens == 59 * 3


@pytest.mark.parametrize("workers", [1, 2])
def test_a_fault_is_named_and_no_output_appears(source: str, job: TokenizeJob, tmp_path: Path, workers: int) -> None:
    with Path(source).open("a") as file:
        file.write("null\n")
    with pytest.raises(ValueError, match=r"d\.jsonl:61: found null"):
        prepare_corpus(plan_units(source), job, tmp_path / "out", plan_key="k", workers=workers)
    assert not exists(tmp_path / "out") and not (tmp_path / "out.parts").exists()


def test_a_corpus_stays_whatever_becomes_of_its_replacement(
    source: str, job: TokenizeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault or an interruption under `--overwrite` is no leave to overwrite without it."""
    out, text = tmp_path / "out", Path(source).read_text()
    prepare_corpus(plan_units(source), job, out, plan_key="old")
    before = files(out)
    Path(source).write_text(text + "null\n")
    with pytest.raises(ValueError, match="found null"):
        prepare_corpus(plan_units(source), job, out, plan_key="fault", overwrite=True)
    Path(source).write_text(text + '{"text": "w1"}\n')
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_tokenize_all", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare_corpus(plan_units(source), job, out, plan_key="new", overwrite=True)
    with pytest.raises(ValueError, match="are there already"):
        prepare_corpus(plan_units(source), job, out, plan_key="new")
    assert files(out) == before
    prepare_corpus(plan_units(source), job, out, plan_key="new", overwrite=True)
    assert files(out) != before and not (tmp_path / "out.parts").exists()


def test_what_ended_in_its_merge_goes_on_without_being_asked(
    source: str, job: TokenizeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_corpus(plan_units(source), job, tmp_path / "whole", plan_key="k")
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "write_info", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare_corpus(plan_units(source), job, out, plan_key="k")
    assert exists(out)
    Path(source).write_text(Path(source).read_text() + "null\n")
    with pytest.raises(ValueError, match="found null"):
        prepare_corpus(plan_units(source), job, out, plan_key="fault")
    Path(source).write_text(Path(source).read_text().removesuffix("null\n"))
    prepare_corpus(plan_units(source), job, out, plan_key="k")
    assert files(out) == files(tmp_path / "whole") and not (tmp_path / "out.parts").exists()


def test_nothing_to_write_is_an_error(job: TokenizeJob, tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text('{"text": ""}\n\n')
    with pytest.raises(ValueError, match=r"no document with text in .*e\.jsonl; skipped: 1 \(empty text\)"):
        prepare_corpus(plan_units(str(tmp_path / "e.jsonl")), job, tmp_path / "out", plan_key="k")


def test_a_finished_corpus_is_not_overwritten_unasked(job: TokenizeJob, tmp_path: Path) -> None:
    path, out = tmp_path / "e.jsonl", tmp_path / "out"
    path.write_text('{"text": "w1"}\n')
    prepare_corpus(plan_units(str(path)), job, out, plan_key="k")
    before = files(out)
    path.write_text('{"text": "w2"}\n')
    with pytest.raises(ValueError, match=r"out\.bin and \.idx are there already: .* --overwrite"):
        prepare_corpus(plan_units(str(path)), job, out, plan_key="l")
    assert files(out) == before and not (tmp_path / "out.parts").exists()
    prepare_corpus(plan_units(str(path)), job, out, plan_key="l", overwrite=True)
    assert files(out) != before


def test_a_place_that_cannot_be_written_is_said_before_the_work(
    source: str, job: TokenizeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "load_tokenizer", lambda *a: pytest.fail("work has begun"))
    for prefix, reason in ((f"{source}/out", f"{source} is a file"), ("/proc/out", "/proc cannot be written to")):
        with pytest.raises(
            ValueError, match=f"{prefix}.bin and .idx cannot be written, for {reason}.* another --output"
        ):
            prepare_corpus(plan_units(source), job, prefix, plan_key="k")


def test_an_empty_source_is_named(tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").touch()
    with pytest.raises(ValueError, match=r"data source '.*e\.jsonl' is empty"):
        plan_units(str(tmp_path / "e.jsonl"))


def test_text_without_tokens_is_skipped_and_counted(job: TokenizeJob, tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text('{"text": "  "}\n{"text": "w1"}\n')
    info = prepare_corpus(plan_units(str(tmp_path / "e.jsonl")), job, tmp_path / "out", plan_key="k")
    assert (info.documents, info.tokens, info.skipped) == (1, 2, {prepare.NO_TOKENS: 1})


def test_a_tokenizer_without_an_end_token_is_refused(
    source: str, tmp_path: Path, word_tokenizer: Callable[..., Path]
) -> None:
    folder = word_tokenizer(tmp_path / "t", 100, eos_token=None)
    job = TokenizeJob(tokenizer=str(folder), cache_dir=str(tmp_path))
    with pytest.raises(ValueError, match="names no eos_token"):
        prepare_corpus(plan_units(source), job, tmp_path / "out", plan_key="k")


def test_two_runs_do_not_write_one_output(source: str, job: TokenizeJob, tmp_path: Path) -> None:
    with prepare._exclusive(tmp_path / "out.parts"), pytest.raises(ValueError, match="another process is writing"):
        prepare_corpus(plan_units(source), job, tmp_path / "out", plan_key="k")


def test_a_long_text_is_one_document_of_several_sequences(
    job: TokenizeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_PIECE", 16)
    (tmp_path / "d.txt").write_text("\n".join(LINES))
    info = prepare_corpus(plan_units(str(tmp_path / "d.txt")), job, tmp_path / "out", plan_key="k")
    dataset = IndexedDataset(tmp_path / "out")
    assert info.documents == len(dataset) == 1 and len(dataset.sequence_lengths) > 10
    assert dataset.read(0).tolist() == [int(word[1:]) for line in LINES for word in line.split()] + [0]


def write(prefix: Path, *rows: list[int], dtype: type[np.integer] = np.int32) -> IndexedDataset:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for row in rows:
            writer.add(row)
            writer.end_document()
        writer.finish()
    return IndexedDataset(prefix)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (([1], [], [5, 100, 3]), r"document 2 holds token id 100, outside the model's \[0, 100\)"),
        (([1], [5, 3], [-1]), "document 2 holds token id -1"),
    ],
)
def test_ids_outside_the_vocabulary_are_named(tmp_path: Path, rows: tuple[list[int], ...], message: str) -> None:
    dataset = write(tmp_path / "c", *rows)
    info = corpus_info(dataset, tmp_path / "cache")
    with pytest.raises(ValueError, match=message):
        check_corpus(dataset, info, 100, None)


def test_a_foreign_corpus_is_scanned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = write(tmp_path / "c", [1, 2], [3])
    first = corpus_info(dataset, tmp_path / "cache")
    monkeypatch.setattr("hybrid.data.corpus.scan", lambda dataset: pytest.fail("scanned again"))
    assert corpus_info(dataset, tmp_path / "cache") == first
    assert first.tokenizer is None


def test_the_content_hash_sees_ids_and_boundaries(tmp_path: Path) -> None:
    contents = {
        scan(write(tmp_path / str(i), *rows)).content
        for i, rows in enumerate([([1, 2], [3]), ([1], [2, 3]), ([1, 2], [4]), ([3], [1, 2])])
    }
    assert len(contents) == 4
    assert scan(write(tmp_path / "again", [1, 2], [3])).content in contents


def test_sequences_out_of_order_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "c", [1], [2])
    raw = bytearray(idx_path(tmp_path / "c").read_bytes())
    raw[34 + 8 : 34 + 24] = np.array([4, 4], "<i8").tobytes()
    idx_path(tmp_path / "c").write_bytes(raw)
    with pytest.raises(ValueError, match="do not follow one another"):
        scan(IndexedDataset(tmp_path / "c"))
