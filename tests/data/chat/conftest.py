"""Tokenizers made on the fly, in the two styles of real ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "What is two plus two? It is four. You are a helpful assistant. Be brief.",
    "user assistant system INST SYS [INST] [/INST] <<SYS>> <</SYS>> <|user|> <|assistant|> <|system|>",
    "Hello there, how are you today? I am fine, thank you! And you? Fine.",
]


def make_tokenizer(folder: Path, special: list[str], *, style: str, bos: str | None, eos: str, pad: str | None) -> Path:
    """A folder with a byte-level BPE (`bytes`) or one with word marks as SentencePiece's (`words`)."""
    if style == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        special, alphabet = ["<unk>", *special, *(f"<0x{i:02X}>" for i in range(256))], []
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    if style == "words":  # as in LLaMA's tokenizer.json: the words mattered in training only
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    if bos is not None:
        single = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
        steps = [processors.ByteLevel(trim_offsets=True), single] if style == "bytes" else [single]
        tokenizer.post_processor = processors.Sequence(steps)
    elif style == "bytes":
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if style == "words":  # byte tokens are ordinary ones
        stated = json.loads((folder / "tokenizer.json").read_text())
        stated["added_tokens"] = [t for t in stated["added_tokens"] if not t["content"].startswith("<0x")]
        (folder / "tokenizer.json").write_text(json.dumps(stated))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "clean_up_tokenization_spaces": False}
    config |= {"bos_token": bos} if bos else {}
    config |= {"pad_token": pad} if pad else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Callable[..., Path]:
    """Makes a tokenizer folder with the given special tokens."""

    def make(
        special: list[str], *, style: str = "bytes", bos: str | None = None, eos: str, pad: str | None = None
    ) -> Path:
        return make_tokenizer(tmp_path / "tokenizer", special, style=style, bos=bos, eos=eos, pad=pad)

    return make
