"""Fixtures of the data tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers


def _word_tokenizer(folder: Path, size: int, **config: object) -> Path:
    vocabulary = {"</s>": 0, **{f"w{i}": i for i in range(1, size)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    stated = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return folder


@pytest.fixture
def word_tokenizer() -> Callable[..., Path]:
    """Makes a folder with a tokenizer of `size` ids: the word `w7` is id 7, and `</s>` is 0."""
    return _word_tokenizer
