"""From what the user names as fine-tuning data to the sets a run reads."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hybrid.data import cache
from hybrid.data.build import DataModule
from hybrid.data.chat.dataset import ChatDataset
from hybrid.data.chat.formats import Format
from hybrid.data.chat.masks import ChatEncoder, TrainOn
from hybrid.data.chat.packing import Packs, best_fit, one_each
from hybrid.data.chat.prepare import ChatCorpus, Options, TooLong, log_report, open_corpus
from hybrid.data.chat.tokenizer import ChatTokenizer, load_chat_tokenizer
from hybrid.data.tokenizer import DEMO, check_vocabulary

logger = logging.getLogger(__name__)

_SPLIT_SEED = 0
"""Not the run's: what is held out stays held out."""


@dataclass(frozen=True, kw_only=True)
class ChatSpec:
    """The fine-tuning data of a run."""

    source: str | Sequence[str]
    """`demo`; a .jsonl, .json or .parquet file, a folder or glob of these, a Hugging Face dataset; or several."""
    tokenizer: str | None
    """A folder, a Hugging Face name or `demo`; None is right for the demo."""
    seq_length: int
    """Tokens per row."""
    vocab_size: int
    """Ids the model has."""
    seed: int
    eval_source: str | Sequence[str] | None = None
    """Held-out data; None holds `eval_fraction` of the samples out."""
    eval_fraction: float = 0.0
    test_fraction: float = 0.0
    """Share of the samples held out from training and evaluation, with `eval_source` too."""
    form: Format | None = None
    """None: detected from the first row."""
    chat_template: str | None = None
    """None for the tokenizer's own, `none`, the name of one of the package's, or a file."""
    train_on: TrainOn = "all"
    packing: bool = True
    too_long: TooLong = "error"
    cache_dir: str | None = None
    """Where prepared samples are kept; None is `~/.cache/hybrid`."""


@dataclass(frozen=True, kw_only=True)
class ChatModule(DataModule):
    """The sets of a fine-tuning run."""

    train: ChatDataset
    eval: ChatDataset | None
    test: ChatDataset | None
    tokenizer: ChatTokenizer


def build_chat_data(spec: ChatSpec) -> ChatModule:
    """Open the data of a fine-tuning run; rows are encoded at first use.

    Safe to call from all processes at once; quicker if one calls it first.

    Raises:
        ValueError: the data cannot be read, does not suit the model, tokenizer or template, or is too little.
    """
    folder = Path(spec.cache_dir) if spec.cache_dir else cache.default_cache_dir()
    sources = [spec.source] if isinstance(spec.source, str) else list(spec.source)
    tokenizer = load_chat_tokenizer(_tokenizer_name(spec, sources), folder, spec.chat_template)
    check_vocabulary(tokenizer, spec.vocab_size)
    options = Options(form=spec.form, train_on=spec.train_on, seq_length=spec.seq_length, too_long=spec.too_long)
    method = ChatEncoder(tokenizer).method
    corpus = open_corpus(sources, tokenizer, options, folder)
    log_report(corpus, " ".join(sources), tokenizer, method)
    chosen, held_out, test = _split(len(corpus), 0.0 if spec.eval_source else spec.eval_fraction, spec.test_fraction)
    held_corpus = corpus
    if spec.eval_source is not None:
        names = [spec.eval_source] if isinstance(spec.eval_source, str) else list(spec.eval_source)
        held_corpus = open_corpus(names, tokenizer, options, folder)
        log_report(held_corpus, " ".join(names), tokenizer, method)
        held_out = np.arange(len(held_corpus))
    train = _dataset(corpus, chosen, spec, tokenizer, spec.seed)
    _log_rows(train, spec)
    return ChatModule(
        train=train,
        eval=_dataset(held_corpus, held_out, spec, tokenizer, None) if len(held_out) else None,
        test=_dataset(corpus, test, spec, tokenizer, None) if len(test) else None,
        tokenizer=tokenizer,
        fingerprint=_fingerprint(corpus, len(chosen), spec),
        corpora=(),
        end_ids=tuple(token for token, _ in corpus.report.ends.most_common() if _is_end(token, tokenizer)),
    )


def _fingerprint(corpus: ChatCorpus, samples: int, spec: ChatSpec) -> str:
    parts = [corpus.report.content, samples, spec.seq_length, spec.seed, spec.packing, spec.eval_fraction]
    # Only where it says something, so that runs begun before there was a test set can go on.
    return cache.fingerprint(*parts, *([spec.test_fraction] if spec.test_fraction else []))


def _split(samples: int, *fractions: float) -> list[NDArray[np.int64]]:
    """Which samples are trained on, and those of each held-out share; one is left to train on."""
    order = np.random.default_rng(_SPLIT_SEED).permutation(samples)
    parts = []
    for fraction in fractions:
        count = min(round(samples * fraction), len(order) - 1)
        parts.append(np.sort(order[:count]))
        order = order[count:]
    return [np.sort(order), *parts]


def _is_end(token: int, tokenizer: ChatTokenizer) -> bool:
    return token == tokenizer.eos_id or token in tokenizer.renderer.added_tokens_decoder


def _tokenizer_name(spec: ChatSpec, sources: Sequence[str]) -> str:
    if spec.tokenizer is not None:
        return spec.tokenizer
    if sources == [DEMO]:
        return DEMO
    raise ValueError("no tokenizer is named: set --tokenizer (the folder of the model, a Hugging Face name, or 'demo')")


def _dataset(
    corpus: ChatCorpus, samples: np.ndarray, spec: ChatSpec, tokenizer: ChatTokenizer, seed: int | None
) -> ChatDataset:
    packs = one_each(len(samples))
    if spec.packing:
        packs = best_fit(corpus.lengths[samples], spec.seq_length)
    return ChatDataset(
        corpus,
        Packs(packs.starts, samples[packs.members]),
        seq_length=spec.seq_length,
        seed=seed,
        packed=spec.packing,
        pad_id=tokenizer.pad_id if tokenizer.pad_id is not None else 0,
    )


def _log_rows(dataset: ChatDataset, spec: ChatSpec) -> None:
    used = int(dataset.corpus.lengths[dataset.packs.members].sum())
    filled = used / (len(dataset) * spec.seq_length)
    kind = "packed" if spec.packing else "one sample a row"
    logger.info(
        "an epoch is %d rows of %d tokens (%s), %.0f%% filled", len(dataset), spec.seq_length, kind, 100 * filled
    )
