"""From a named source to the sets of a run: sources, caches, faults, fingerprints."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from hybrid.data.build import DataModule, build_data, check_resumed, parse_blend
from hybrid.data.indexed import IndexedWriter
from hybrid.data.indexes import split_documents
from hybrid.data.loader import BatchLoader
from hybrid.data.samples import IGNORE_INDEX, SampleSource
from hybrid.data.spec import DataSpec


@pytest.fixture
def spec(tmp_path: Path, word_tokenizer: Callable[..., Path]) -> DataSpec:
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": f"w{i} w{i}"}) + "\n" for i in range(1, 61)))
    return DataSpec(
        source=str(tmp_path / "d.jsonl"),
        tokenizer=str(word_tokenizer(tmp_path / "tokenizer", 100)),
        seq_length=8,
        vocab_size=128,
        seed=5,
        eval_fraction=0.1,
        cache_dir=str(tmp_path / "cache"),
    )


def words(source: SampleSource) -> list[int]:
    """Sorted ids of one pass, end tokens and filling (both 0) left out."""
    tokens = np.concatenate([source.read(place)[0] for place in range(len(source))])
    return sorted(tokens[tokens != 0].tolist())


def test_every_document_is_in_one_set(spec: DataSpec) -> None:
    module = build_data(replace(spec, test_fraction=0.2))
    assert module.eval is not None and module.test is not None
    parts = [words(module.train), words(module.eval), words(module.test)]
    assert sorted(sum(parts, [])) == sorted([*range(1, 61)] * 2)
    assert [len(set(part)) for part in parts] == [42, 6, 12]
    assert not set(parts[0]) & set(parts[1]) and not set(parts[1]) & set(parts[2])


def test_the_seed_moves_samples_but_not_the_split(spec: DataSpec) -> None:
    first, second = build_data(spec), build_data(replace(spec, seed=6))
    assert first.eval is not None and second.eval is not None
    assert words(first.eval) == words(second.eval)
    assert first.train.read(0)[0].tolist() != second.train.read(0)[0].tolist()
    assert build_data(replace(spec, eval_fraction=0.0)).eval is None


def test_every_form_of_the_same_text_gives_the_same_samples(spec: DataSpec, tmp_path: Path) -> None:
    raw = Path(str(spec.source)).read_bytes()
    (tmp_path / "z.jsonl.gz").write_bytes(gzip.compress(raw))
    (tmp_path / "crlf.jsonl").write_bytes(b"\xef\xbb\xbf" + raw.replace(b"\n", b"\r\n"))
    module = build_data(spec)
    for name in ("z.jsonl.gz", "crlf.jsonl"):
        other = build_data(replace(spec, source=str(tmp_path / name)))
        assert other.fingerprint == module.fingerprint
        assert other.train.read(3)[0].tolist() == module.train.read(3)[0].tolist()


def test_text_is_tokenised_once_and_again_when_it_changes(spec: DataSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build_data(spec)
    with monkeypatch.context() as patch:
        patch.setattr("hybrid.data.build.prepare_corpus", lambda *a, **k: pytest.fail("tokenised again"))
        assert build_data(spec).fingerprint == first.fingerprint
    with Path(str(spec.source)).open("a") as file:
        file.write('{"text": "w99"}\n')
    changed = build_data(spec)
    assert changed.corpora[0].documents == 61
    assert changed.fingerprint != first.fingerprint


@pytest.mark.parametrize("change", [{"seq_length": 4}, {"seed": 6}, {"eval_fraction": 0.2}, {"reset_attention": True}])
def test_the_fingerprint_covers_what_decides_samples(spec: DataSpec, change: dict[str, object]) -> None:
    assert build_data(replace(spec, **change)).fingerprint != build_data(spec).fingerprint


def test_processes_that_start_at_once_agree(spec: DataSpec, tmp_path: Path) -> None:
    code = f"from hybrid.data.build import *; print(build_data({spec!r}).fingerprint)"
    makers = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    results = {maker.communicate(timeout=120)[0] for maker in makers}
    assert {maker.returncode for maker in makers} == {0}
    assert len(results) == 1
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.name.startswith(".")] == []


def test_demo_needs_no_files(tmp_path: Path) -> None:
    spec = DataSpec(
        source="demo",
        tokenizer=None,
        seq_length=128,
        vocab_size=2048,
        seed=0,
        eval_fraction=0.05,
        cache_dir=str(tmp_path),
    )
    module = build_data(spec)
    assert module.tokenizer is not None and module.tokenizer.size == 2048
    assert module.eval is not None and len(module.eval) > 4
    tokens, labels = module.train.read(0)
    assert (tokens[1:] == labels[:-1]).all() and tokens.max() < 2048
    with pytest.raises(ValueError, match="2048 ids, but the model's vocab_size is 2000"):
        build_data(replace(spec, vocab_size=2000))


def test_a_single_text_file_has_its_end_held_out(spec: DataSpec, tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text(" ".join(f"w{i}" for i in range(1, 61)))
    module = build_data(replace(spec, source=str(tmp_path / "d.txt")))
    assert module.eval is not None
    assert words(module.train) == list(range(1, 56))
    assert words(module.eval)[0] == 56
    whole = build_data(replace(spec, source=str(tmp_path / "d.txt"), eval_fraction=0.0))
    assert words(whole.train)[-1] >= 57
    both = build_data(replace(spec, source=str(tmp_path / "d.txt"), test_fraction=0.2))
    assert both.eval is not None and both.test is not None
    parts = [words(part) for part in (both.train, both.eval, both.test)]
    assert [parts[0][0], parts[1][0], parts[2][0]] == [1, 44, 50]
    assert [parts[0][-1], parts[1][-1]] == [43, 49]


def test_a_set_of_too_little_text_is_named(spec: DataSpec, tmp_path: Path) -> None:
    (tmp_path / "tiny.txt").write_text("w1 w2 w3")
    tiny = replace(spec, source=str(tmp_path / "tiny.txt"))
    with pytest.raises(
        ValueError, match=r"tiny.txt: the evaluation set is 1 document with 0 tokens, and a sample needs at"
    ) as e:
        build_data(tiny)
    assert str(e.value).startswith(f"data source {tmp_path}")
    assert str(e.value).endswith("give more text, or set hybrid.data.eval_fraction, which is 0.1, to 0 or to more")
    (tmp_path / "tiny.txt").write_text("w1")
    with pytest.raises(ValueError, match="training set is 1 document with 1 token, .*hold less of it out: hybrid.data"):
        build_data(replace(tiny, eval_fraction=0.7))
    with pytest.raises(ValueError, match="c has 1 document, too few for a training set and held-out sets of"):
        split_documents(1, (0.1, 0.1), None, "c")


def corpus(prefix: Path, count: int, first: int) -> str:
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for document in range(count):
            writer.add([first + document] * 9)
            writer.end_document()
        writer.finish()
    return str(prefix)


def test_a_blend_of_token_files_keeps_its_proportions(spec: DataSpec, tmp_path: Path) -> None:
    small, large = corpus(tmp_path / "a", 10, 1), corpus(tmp_path / "b", 40, 50)
    blended = replace(spec, source=["0.25", small, "0.75", large], tokenizer=None)
    module = build_data(blended)
    taken = [int(module.train.read(place)[0].max()) < 50 for place in range(400)]
    for length in range(1, 401):
        assert abs(sum(taken[:length]) - length / 4) < 1
    assert module.eval is not None
    assert len({*words(module.eval)}) == 1 + 4
    assert build_data(replace(blended, source=f"0.25 {small} 0.75 {large}.bin")).fingerprint == module.fingerprint
    assert build_data(replace(blended, source=["0.5", small, "0.5", large])).fingerprint != module.fingerprint


def test_paths_without_weights_are_all_read_once(spec: DataSpec, tmp_path: Path) -> None:
    paths = [corpus(tmp_path / "a", 10, 1), corpus(tmp_path / "b", 40, 50)]
    module = build_data(replace(spec, source=paths, tokenizer=None, eval_fraction=0.0))
    assert set(words(module.train)) == {*range(1, 11), *range(50, 90)}


@pytest.mark.parametrize(
    ("source", "weights", "paths"),
    [
        ("a b.jsonl", None, ["a b.jsonl"]),
        ("0.3 a 1e-1 b", [Fraction(3, 10), Fraction(1, 10)], ["a", "b"]),
        (["1", "a", "2", "b"], [Fraction(1), Fraction(2)], ["a", "b"]),
        (["a", "b"], None, ["a", "b"]),
        ("30", None, ["30"]),
    ],
)
def test_blend_forms(source: str | list[str], weights: list[Fraction] | None, paths: list[str]) -> None:
    assert parse_blend(source) == (weights, paths)


@pytest.mark.parametrize("source", ["0.3 a b", "0.3 a 0.7", "0 a 1 b", "", []])
def test_malformed_blends_are_errors(source: str | list[str]) -> None:
    with pytest.raises(ValueError, match="blend|no data source"):
        parse_blend(source)


def test_a_resume_with_other_data_is_refused(spec: DataSpec) -> None:
    stored = build_data(spec).fingerprint
    check_resumed(build_data(replace(spec, train_samples=99)), stored)
    with pytest.raises(ValueError, match=f"trained on {stored}: give the same text"):
        check_resumed(build_data(replace(spec, seq_length=4)), stored)


def test_indexes_of_all_epochs_are_built_up_front(
    spec: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid.data.cache._WORTH_A_FILE", 1)
    module = build_data(replace(spec, train_samples=3 * 21))
    assert len(module.train) == 21  # 54 documents of 3 tokens
    assert len(list((tmp_path / "cache").glob("index-*.npy"))) == 3 + 1
    module.train.read(62)
    assert len(list((tmp_path / "cache").glob("index-*.npy"))) == 3 + 1


def test_a_failed_preparation_leaves_nothing_in_the_cache(spec: DataSpec, tmp_path: Path) -> None:
    with Path(str(spec.source)).open("a") as file:
        file.write("null\n")
    with pytest.raises(ValueError, match=r"d\.jsonl:61"):
        build_data(spec)
    assert list((tmp_path / "cache").iterdir()) == []


def test_faults_are_named(spec: DataSpec, tmp_path: Path, word_tokenizer: Callable[..., Path]) -> None:
    token_file = corpus(tmp_path / "c", 10, 120)
    faults: list[tuple[dict[str, object], str]] = [
        ({"tokenizer": None}, "no tokenizer is named"),
        ({"vocab_size": 99}, "100 ids, but the model's vocab_size is 99"),
        ({"source": str(tmp_path / "gone.bin")}, "gone.bin' does not exist"),
        ({"source": token_file, "tokenizer": None}, "document 8 holds token id 128"),
        ({"eval_fraction": 1.0}, r"must each be in \[0, 1\)"),
        ({"text_key": "body"}, r"d\.jsonl:1: no key 'body'"),
    ]
    for change, message in faults:
        with pytest.raises(ValueError, match=message):
            build_data(replace(spec, **change))


def test_a_corpus_of_another_tokenizer_is_refused(
    spec: DataSpec, tmp_path: Path, word_tokenizer: Callable[..., Path]
) -> None:
    build_data(spec)
    (prefix,) = (p.parent / "tokens" for p in (tmp_path / "cache").glob("corpus-*/tokens.bin"))
    other = word_tokenizer(tmp_path / "other", 90)
    with pytest.raises(ValueError, match="was prepared with tokenizer .*100 ids.*has 90 ids"):
        build_data(replace(spec, source=str(prefix), tokenizer=str(other)))
    with pytest.raises(ValueError, match="tokenizer of 100 ids, but the model's vocab_size is 99"):
        build_data(replace(spec, source=str(prefix), tokenizer=None, vocab_size=99))
    assert build_data(replace(spec, source=str(prefix), tokenizer=None)).corpora[0].documents == 60


def _ids(module: DataModule, dp: int, gas: int, start: int, steps: int) -> list[list[int]]:
    """Global steps of 8 samples, each as the sorted fingerprints of its rows."""
    loaders = [
        BatchLoader(
            module.train,
            micro_batch_size=8 // dp // gas,
            gradient_accumulation_steps=gas,
            dp_rank=rank,
            dp_size=dp,
            samples_consumed=start,
        )
        for rank in range(dp)
    ]
    found = [
        sorted(hash(tuple(row.tolist())) for _ in range(gas) for loader in loaders for row in next(loader)[0])
        for _ in range(steps)
    ]
    for loader in loaders:
        loader.close()
    return found


def test_a_run_resumes_over_real_files_under_another_layout(spec: DataSpec) -> None:
    module = build_data(spec)
    whole = _ids(module, 1, 1, 0, 9)
    again = build_data(spec)
    assert _ids(again, 2, 2, 0, 4) + _ids(again, 4, 1, 32, 5) == whole


def test_packing_yields_positions_and_segments(spec: DataSpec) -> None:
    module = build_data(replace(spec, reset_attention=True))
    with BatchLoader(module.train, micro_batch_size=2, gradient_accumulation_steps=1, dp_rank=0, dp_size=1) as loader:
        tokens, labels, positions, segments = next(loader)
    assert tokens.shape == labels.shape == positions.shape == segments.shape == (2, 8)
    # Documents are two words and an end token; the word after an end token is not predicted.
    for row in range(2):
        for t in range(1, 8):
            assert (tokens[row, t - 1] == 0) == bool(positions[row, t] == 0)
        ends = tokens[row] == 0
        assert (labels[row][ends] == IGNORE_INDEX).all()


def test_a_cache_folder_that_cannot_be_made_is_named_with_its_key(spec: DataSpec, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file/cache.*hybrid\.data\.cache_dir"):
        build_data(replace(spec, cache_dir=str(tmp_path / "file" / "cache")))
