"""Fast tokenizers, reached without importing transformers where a tokenizer.json is at hand."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hybrid.data.cache import publish_folder, temporary_beside

DEMO = "demo"
"""The name of the tokenizer trained on the demo text."""
_DEMO_VOCAB_SIZE = 2048
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "chat_template.jinja",
)


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """A fast tokenizer and what training needs to know about it."""

    backend: Tokenizer
    name: str
    """As the user gave it: a folder, a name, or `demo`."""
    folder: Path | None
    """Where its files lie; None if it came from the Hugging Face cache."""
    eos_id: int | None
    pad_id: int | None

    @property
    def size(self) -> int:
        """Rows a model needs: the largest id plus one, added tokens included."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def fingerprint(self) -> str:
        """A hash of which id means which token: equal for files that one model can read."""
        pairs = sorted((index, token) for token, index in self.backend.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:16]

    @property
    def behaviour(self) -> str:
        """A hash of all that decides the ids of a text: vocabulary, merges, normaliser, end token."""
        return hashlib.sha256(f"{self.backend.to_str()}{self.eos_id}".encode()).hexdigest()[:16]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens shown."""
        return str(self.backend.decode(list(ids), skip_special_tokens=False))

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files into `folder`, as `AutoTokenizer` reads them."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        if self.folder is None:
            _auto_tokenizer(self.name).save_pretrained(target)
            return
        for name in _FILES:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, target / name)


def load_tokenizer(name_or_folder: str | Path, cache_dir: str | Path) -> TextTokenizer:
    """The tokenizer `demo`, of a folder, or of a Hugging Face name.

    Raises:
        ValueError: there is no such tokenizer, or it has no fast form.
    """
    name = str(name_or_folder)
    if name == DEMO:
        folder = demo_tokenizer(cache_dir)
        return _from_folder(name, folder, _special_tokens(folder))
    path = Path(name)
    folder = path.parent if path.name == "tokenizer.json" else path
    if (folder / "tokenizer.json").is_file():
        special = _special_tokens(folder)
        if special.get("eos_token") is not None:
            return _from_folder(name, folder, special)
    # No tokenizer.json, or an end token that only the tokenizer's class knows.
    auto = _auto_tokenizer(str(folder) if (folder / "tokenizer.json").is_file() else name)
    backend = getattr(auto, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"tokenizer {name!r} has no fast form (tokenizer.json); convert it with transformers first")
    return TextTokenizer(
        backend=_plain(backend),
        name=name,
        folder=folder if (folder / "tokenizer.json").is_file() else None,
        eos_id=auto.eos_token_id,
        pad_id=auto.pad_token_id,
    )


def check_vocabulary(tokenizer: TextTokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer that can produce ids the model has no row for.

    Raises:
        ValueError: the tokenizer is larger than the model's vocabulary.
    """
    if tokenizer.size > vocab_size:
        raise ValueError(
            f"tokenizer {tokenizer.name!r} has {tokenizer.size} ids, but the model's vocab_size is {vocab_size}: "
            f"set vocab_size to at least {tokenizer.size} in the model's config (the rows that pad it for tensor "
            "parallelism are not usable), or use the tokenizer that belongs to the model"
        )


def _plain(backend: Tokenizer) -> Tokenizer:
    """Without the truncation and padding that some tokenizer.json files carry."""
    backend.no_truncation()
    backend.no_padding()
    return backend


def _from_folder(name: str, folder: Path, special: dict[str, str]) -> TextTokenizer:
    try:
        backend = _plain(Tokenizer.from_file(str(folder / "tokenizer.json")))
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise ValueError(f"{folder / 'tokenizer.json'} is not a readable tokenizer: {error}") from error

    def token_id(key: str) -> int | None:
        return backend.token_to_id(special[key]) if key in special else None

    return TextTokenizer(
        backend=backend, name=name, folder=folder, eos_id=token_id("eos_token"), pad_id=token_id("pad_token")
    )


def _special_tokens(folder: Path) -> dict[str, str]:
    """`eos_token` and `pad_token` as the folder's files state them."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            continue
        stated: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
        for key in ("eos_token", "pad_token"):
            value = stated.get(key)
            token = value.get("content") if isinstance(value, dict) else value
            if isinstance(token, str):
                found[key] = token
    return found


def _auto_tokenizer(name: str) -> Any:
    # Costs seconds, and most runs have a tokenizer.json.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, use_fast=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer {name!r} is neither a folder with a tokenizer.json nor in Hugging Face's cache or hub: {error}"
        ) from error


def demo_texts() -> Iterator[str]:
    """The demo corpus: Python's own help topics, one document each."""
    from pydoc_data.topics import topics

    yield from topics.values()


def demo_tokenizer(cache_dir: str | Path, vocab_size: int = _DEMO_VOCAB_SIZE) -> Path:
    """The folder of a byte-level BPE trained on the demo text, made at first use.

    `AutoTokenizer` loads the folder. Training is deterministic, so processes that start at once make the same files,
    and whichever renames its folder first wins.
    """
    texts = list(demo_texts())
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
    folder = Path(cache_dir) / f"demo-tokenizer-{vocab_size}-{digest}"
    if folder.is_dir():
        return folder
    temporary = temporary_beside(folder)
    temporary.mkdir(parents=True)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(temporary / "tokenizer.json"))
    config = {**special, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (temporary / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    publish_folder(temporary, folder)
    return folder
