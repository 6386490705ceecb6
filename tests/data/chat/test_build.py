"""From files to the rows a run reads: counts, limits, packing, and the fingerprint."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid.data.chat.build import ChatModule, ChatSpec, build_chat_data
from hybrid.data.chat.show import show_samples
from hybrid.data.chat.tokenizer import load_chat_tokenizer
from hybrid.data.loader import BatchLoader, EvalLoader

WORDS = ["fine", "you", "two", "plus", "hello", "four", "day"]


def chat(question: str, answer: str | None) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}]
    return {"messages": turns if answer is None else [*turns, {"role": "assistant", "content": answer}]}


def rows(count: int) -> list[dict[str, Any]]:
    return [chat(WORDS[i % 7], " ".join(WORDS[: 1 + i % 5])) for i in range(count)]


@pytest.fixture
def build(tmp_path: Path, tokenizer_folder: Callable[..., Path]) -> Callable[..., ChatModule]:
    """Builds the data of the given rows, with a tokenizer whose padding is its end token."""
    folder = tokenizer_folder(["<s>", "</s>"], style="words", bos="<s>", eos="</s>", pad="</s>")

    def make(given: list[Any], eval_rows: list[Any] | None = None, **changes: Any) -> ChatModule:
        path = tmp_path / "chat.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in given))
        held = tmp_path / "held.jsonl"
        if eval_rows is not None:
            held.write_text("".join(json.dumps(row) + "\n" for row in eval_rows))
        options = {
            "source": str(path), "tokenizer": str(folder), "seq_length": 64, "vocab_size": 1000, "seed": 3,
            "chat_template": "zephyr", "cache_dir": str(tmp_path / "cache"),
            "eval_source": str(held) if eval_rows is not None else None,
        }  # fmt: skip
        return build_chat_data(ChatSpec(**{**options, **changes}))

    return make


def read_back(module: ChatModule, sample: tuple[np.ndarray, ...]) -> list[tuple[list[int], list[int]]]:
    """(ids, learnt ids) of each segment of a row but the filling."""
    tokens, labels, positions, segments = sample
    found = []
    for segment in range(int(segments.max()) + 1):
        places = np.flatnonzero(segments == segment)
        assert positions[places].tolist() == list(range(len(places)))
        learnt = [int(label) for label in labels[places] if label != -100]
        if learnt:
            found.append((tokens[places].tolist(), learnt))
            assert labels[places[-1]] == -100
            for place in places[:-1]:
                assert labels[place] in (-100, tokens[place + 1])
        else:
            assert set(tokens[places]) == {module.tokenizer.pad_id} and segment == segments.max()
    return found


def test_every_sample_once_in_an_epoch(build: Callable[..., ChatModule]) -> None:
    module = build(rows(40))
    expected = sorted(module.train.corpus.sample(i)[0].tolist() for i in range(40))
    for epoch in range(2):
        places = range(epoch * len(module.train), (epoch + 1) * len(module.train))
        found = [ids for place in places for ids, _ in read_back(module, module.train.read(place))]
        assert sorted(found) == expected
    assert len(module.train) < 30
    first, second = (
        [module.train.read(p)[0].tolist() for p in range(start, start + len(module.train))]
        for start in (0, len(module.train))
    )
    assert first != second and sorted(first) == sorted(second)


def test_the_first_end_token_is_learnt_though_it_is_the_padding(build: Callable[..., ChatModule]) -> None:
    for packing in (True, False):
        module = build(rows(3), packing=packing)
        end = module.tokenizer.eos_id
        assert module.tokenizer.pad_id == end and module.end_ids == (end,)
        labels = np.concatenate([module.train.read(place)[1] for place in range(len(module.train))])
        assert (labels == end).sum() == 3
        assert len(module.train.read(0)) == (4 if packing else 2)
        if not packing:
            assert len(module.train) == 3
            for place in range(3):
                tokens, labels = module.train.read(place)
                last = int(np.flatnonzero(labels != -100)[-1])
                assert labels[last] == end == tokens[last + 1]


def test_rows_without_a_target_are_counted_and_named(
    build: Callable[..., ChatModule], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        module = build([chat("a", "b"), chat("a", None), chat("a", ""), chat("c", "d")])
    report = module.train.corpus.report
    assert (report.rows, report.samples, report.counts) == (4, 2, {"without a target": 2})
    assert "2 rows without a target: chat.jsonl:2, chat.jsonl:3" in caplog.text
    assert "format messages" in caplog.text and "derived from the template" in caplog.text
    with pytest.raises(ValueError, match=r"none of 1 rows can be trained on: 1 without a target \(chat.jsonl:1\)"):
        build([chat("a", None)])
    with pytest.raises(ValueError, match=r"data source '.*chat.jsonl' is empty"):
        build([])


def test_samples_that_are_too_long(build: Callable[..., ChatModule], caplog: pytest.LogCaptureFixture) -> None:
    long_answer, long_question = chat("a", "fine " * 90), chat("fine " * 90, "b")
    given = [chat("a", "b"), long_answer, long_question]
    with pytest.raises(ValueError, match=r"chat.jsonl:2: \d+ tokens, and seq_length is 64.*too_long"):
        build(given)
    dropped = build(given, too_long="drop")
    assert len(dropped.train.corpus) == 1 and dropped.train.corpus.report.counts == {"too long": 2}
    assert "2 rows too long: chat.jsonl:2, chat.jsonl:3" in caplog.text
    cut = build(given, too_long="truncate")
    assert cut.train.corpus.report.counts == {"truncated": 1, "without a target": 1}
    assert cut.train.corpus.lengths.tolist() == [dropped.train.corpus.lengths[0], 64]
    assert "1 rows truncated: chat.jsonl:2" in caplog.text


def test_formats_are_not_mixed(build: Callable[..., ChatModule]) -> None:
    with pytest.raises(ValueError, match="chat.jsonl:2: no key 'messages'.*the format is messages since the first row"):
        build([chat("a", "b"), {"prompt": "a", "completion": "b"}])


def test_held_out_rows(build: Callable[..., ChatModule]) -> None:
    module = build(rows(40), eval_fraction=0.25, packing=False)
    assert module.eval is not None and len(module.eval) == 10 and len(module.train) == 30
    held = {tuple(module.eval.row(i)[0]) for i in range(10)}
    assert build(rows(40), eval_fraction=0.25, packing=False, seed=9).eval is not None
    again = build(rows(40), eval_fraction=0.25, packing=False, seed=9).eval
    assert again is not None and {tuple(again.row(i)[0]) for i in range(10)} == held
    own = build(rows(40), rows(4), eval_fraction=0.25, packing=False)
    assert own.eval is not None and len(own.eval) == 4 and len(own.train) == 40
    assert build(rows(1), eval_fraction=0.9).eval is None


def test_rows_for_a_test(build: Callable[..., ChatModule]) -> None:
    """Rows of their own, and the evaluation's stay what they are without them."""

    def held(module: ChatModule) -> list[set[int]]:
        sets = (module.train, module.eval, module.test)
        return [set(s.packs.members.tolist()) if s is not None else set() for s in sets]

    train, evaluation, test = held(build(rows(40), eval_fraction=0.25, test_fraction=0.2, packing=False))
    assert [len(train), len(evaluation), len(test)] == [22, 10, 8] and len(train | evaluation | test) == 40
    assert held(build(rows(40), eval_fraction=0.25, packing=False))[1:] == [evaluation, set()]
    own = held(build(rows(40), rows(4), eval_fraction=0.25, test_fraction=0.2, packing=False))
    assert [len(part) for part in own] == [32, 4, 8]


def test_the_fingerprint_says_whether_positions_mean_the_same(build: Callable[..., ChatModule]) -> None:
    base = build(rows(20)).fingerprint
    assert build(rows(20)).fingerprint == base
    changed = [
        build(rows(21)), build(rows(20), seed=4), build(rows(20), packing=False), build(rows(20), seq_length=60),
        build(rows(20), chat_template="chatml"),
    ]  # fmt: skip
    assert len({base, *(module.fingerprint for module in changed)}) == 6


def test_the_loaders_take_it(build: Callable[..., ChatModule]) -> None:
    """Five rows, two a microbatch, two replicas: the same number of batches, the rest blank."""
    module = build(rows(5), packing=False, eval_fraction=0.0)
    loaders = [EvalLoader(module.train, micro_batch_size=2, dp_rank=rank, dp_size=2) for rank in (0, 1)]
    assert len(loaders[0]) == len(loaders[1]) == 2
    learnt = sum(int((labels != -100).sum()) for loader in loaders for _, labels in loader)
    assert learnt == module.train.corpus.report.supervised
    few = build(rows(3), packing=True)
    with BatchLoader(few.train, micro_batch_size=2, gradient_accumulation_steps=1, dp_rank=1, dp_size=2) as batches:
        assert [tuple(part.shape) for part in next(batches)] == [(2, 64)] * 4


def test_a_tokenizer_with_more_tokens_than_the_model(build: Callable[..., ChatModule]) -> None:
    size = build(rows(2)).tokenizer.size
    with pytest.raises(ValueError, match=f"has {size} ids, but the model's vocab_size is {size - 1}"):
        build(rows(2), vocab_size=size - 1)


def test_the_demo_needs_no_file(tmp_path: Path) -> None:
    spec = ChatSpec(source="demo", tokenizer=None, seq_length=128, vocab_size=2048, seed=0, cache_dir=str(tmp_path))
    module = build_chat_data(spec)
    shown = list(show_samples(module.train, module.tokenizer, 2))
    assert len(shown) == 4 and '\x1b[32m{"a": ' in shown[1] and "</s>\x1b[0m" in shown[1]


def test_shown_without_colour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    spec = ChatSpec(source="demo", tokenizer=None, seq_length=128, vocab_size=2048, seed=0, cache_dir=str(tmp_path))
    module = build_chat_data(spec)
    (_, text) = show_samples(module.train, module.tokenizer, 1)
    assert text.count("[[") == text.count("]]") == 1 and "\x1b" not in text and "</s>]]" in text


def test_the_template_is_saved_with_the_tokenizer(build: Callable[..., ChatModule], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    module = build(rows(2), chat_template="chatml")
    module.tokenizer.save(tmp_path / "saved")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    turn = [{"role": "user", "content": "x"}]
    assert theirs.apply_chat_template(turn, tokenize=False) == "<|im_start|>user\nx<|im_end|>\n"
    assert load_chat_tokenizer(tmp_path / "saved", tmp_path).template == module.tokenizer.template
    with pytest.raises(ValueError, match="chat_template 'chatmll' is neither one of none, chatml"):
        build(rows(2), chat_template="chatmll")
