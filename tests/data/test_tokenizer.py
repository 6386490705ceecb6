"""Tokenizers: the demo's own, folders, faults, and a vocabulary that must fit the model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hybrid.data.tokenizer import check_vocabulary, demo_texts, demo_tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_the_demo_tokenizer_loads_in_transformers_and_agrees(cache: Path, tmp_path: Path) -> None:
    ours = load_tokenizer("demo", cache)
    assert ours.size == 2048
    ours.save(tmp_path / "saved")
    text = next(demo_texts()) + " caf\u00e9 \u65e5\u672c\n\n\t  x"
    for folder in (demo_tokenizer(cache), tmp_path / "saved"):
        theirs = AutoTokenizer.from_pretrained(folder)
        assert isinstance(theirs, PreTrainedTokenizerFast)
        assert theirs(text, add_special_tokens=False).input_ids == ours.encode([text])[0]
        assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (ours.eos_id, ours.pad_id, 2048)
    assert ours.decode(ours.encode([text])[0]) == text


def test_the_demo_tokenizer_is_the_same_everywhere(cache: Path, tmp_path: Path) -> None:
    here = demo_tokenizer(cache)
    code = f"from hybrid.data.tokenizer import demo_tokenizer; demo_tokenizer({str(tmp_path)!r})"
    makers = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [maker.wait(timeout=60) for maker in makers] == [0, 0]
    (there,) = tmp_path.iterdir()
    assert there.name == here.name
    assert (there / "tokenizer.json").read_bytes() == (here / "tokenizer.json").read_bytes()


def test_the_common_path_does_not_import_transformers(
    cache: Path, tmp_path: Path, word_tokenizer: Callable[..., Path]
) -> None:
    folder = word_tokenizer(tmp_path / "t", 9)
    code = (
        "import sys; from hybrid.data.tokenizer import load_tokenizer; import hybrid.data.prepare; "
        f"load_tokenizer('demo', {str(cache)!r}), load_tokenizer({str(folder)!r}, '.'); "
        "assert not {'transformers', 'datasets', 'pyarrow', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_folder_with_truncation_and_padding_gives_plain_ids(
    cache: Path, tmp_path: Path, word_tokenizer: Callable[..., Path]
) -> None:
    folder = word_tokenizer(tmp_path / "t", 9)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=5)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder, cache)
    assert tokenizer.encode(["w1 w2 w3", "w8"]) == [[1, 2, 3], [8]]
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.size) == (0, None, 9)
    assert load_tokenizer(folder / "tokenizer.json", cache).fingerprint == tokenizer.fingerprint


def test_an_end_token_that_only_the_class_knows(
    cache: Path, tmp_path: Path, word_tokenizer: Callable[..., Path]
) -> None:
    backend = Tokenizer.from_file(str(word_tokenizer(tmp_path / "t", 9) / "tokenizer.json"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved", cache).eos_id == 0
    (tmp_path / "t" / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path / "t" / "tokenizer.json", cache).eos_id is None


def test_special_tokens_may_be_objects(cache: Path, tmp_path: Path, word_tokenizer: Callable[..., Path]) -> None:
    folder = word_tokenizer(tmp_path / "t", 9, eos_token={"content": "w3", "lstrip": False})
    assert load_tokenizer(folder, cache).eos_id == 3


@pytest.mark.parametrize("name", ["no/such-tokenizer", "missing"])
def test_a_missing_tokenizer_is_named(cache: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"tokenizer '{name}' is neither a folder"):
        load_tokenizer(name, cache)


def test_a_malformed_tokenizer_is_named(cache: Path, tmp_path: Path, word_tokenizer: Callable[..., Path]) -> None:
    folder = word_tokenizer(tmp_path / "t", 9)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a readable tokenizer"):
        load_tokenizer(folder, cache)


def test_a_tokenizer_larger_than_the_model_is_refused(
    cache: Path, tmp_path: Path, word_tokenizer: Callable[..., Path]
) -> None:
    tokenizer = load_tokenizer(word_tokenizer(tmp_path / "t", 32_001), cache)
    check_vocabulary(tokenizer, 32_001)
    with pytest.raises(
        ValueError, match="32001 ids, but the model's vocab_size is 32000: set vocab_size to at least 32001"
    ):
        check_vocabulary(tokenizer, 32_000)


def test_the_fingerprint_is_of_the_vocabulary(cache: Path, tmp_path: Path, word_tokenizer: Callable[..., Path]) -> None:
    first = load_tokenizer(word_tokenizer(tmp_path / "a", 9), cache)
    second = load_tokenizer(word_tokenizer(tmp_path / "b", 9, eos_token="w1"), cache)
    third = load_tokenizer(word_tokenizer(tmp_path / "c", 10), cache)
    assert first.fingerprint == second.fingerprint != third.fingerprint
    assert first.behaviour != second.behaviour
