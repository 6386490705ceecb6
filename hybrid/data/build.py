"""From what the user names as data to the sets a run reads."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hybrid.data import cache, indexed
from hybrid.data.blend import BlendedDataset
from hybrid.data.corpus import CorpusInfo, check_corpus, corpus_info
from hybrid.data.indexes import split_documents
from hybrid.data.prepare import TokenizeJob, prepare_corpus
from hybrid.data.samples import Corpus, CutDocument, GPTDataset, SampleSource
from hybrid.data.sources import plan_units, source_state
from hybrid.data.spec import DataSpec
from hybrid.data.tokenizer import DEMO, TextTokenizer, check_vocabulary, demo_texts, load_tokenizer

_CACHE_VERSION = 1

_SETS = ("training", "evaluation", "test")


@dataclass(frozen=True, kw_only=True)
class DataModule:
    """The sets of a run."""

    train: SampleSource
    eval: SampleSource | None
    test: SampleSource | None
    tokenizer: TextTokenizer | None
    """None for token files when no tokenizer was named."""
    fingerprint: str
    """Equal for two runs exactly if equal positions give equal samples: a resumed run checks it."""
    corpora: tuple[CorpusInfo, ...]
    end_ids: tuple[int, ...] = ()
    """Tokens that generation has to stop at, the most frequent first, where the data say so."""


def build_data(spec: DataSpec) -> DataModule:
    """Open the data of a run; text is tokenised and large indexes are built at first use.

    Safe to call from all processes at once. It is quicker if one process calls it first, since the others then find
    all that it prepared.

    Raises:
        ValueError: the data cannot be read, does not suit the model or the tokenizer, or is too little.
    """
    folder = _cache_folder(spec)
    tokenizer = _tokenizer(spec, folder)
    weights, paths = parse_blend(spec.source)
    opened = [_open_corpus(path, spec, tokenizer, folder) for path in paths]
    sets = [_component(path, *corpus, spec, tokenizer, folder) for path, corpus in zip(paths, opened, strict=True)]
    train, evaluation, test = (list(group) for group in zip(*sets, strict=True))
    infos = tuple(info for _, info in opened)
    _build_indexes(train, evaluation, test, weights, spec.train_samples)
    return DataModule(
        train=_blend([part for part in train if part is not None], weights),
        eval=_blend([part for part in evaluation if part is not None], None) if spec.eval_fraction else None,
        test=_blend([part for part in test if part is not None], None) if spec.test_fraction else None,
        tokenizer=tokenizer,
        fingerprint=_fingerprint(spec, infos, weights),
        corpora=infos,
    )


def _cache_folder(spec: DataSpec) -> Path:
    folder = Path(spec.cache_dir) if spec.cache_dir else cache.default_cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"the folder for prepared tokens cannot be made: {error}; name another with hybrid.data.cache_dir"
        ) from None
    return folder


def check_resumed(module: DataModule, trained_on: str) -> None:
    """Refuse to go on with other data than a checkpoint was trained on.

    Raises:
        ValueError: the fingerprints differ, so positions would no longer mean the same samples.
    """
    if module.fingerprint != trained_on:
        raise ValueError(
            f"the data's fingerprint is {module.fingerprint}, but the checkpoint was trained on {trained_on}: give the "
            "same text, tokenizer, blend, seq_length, seed and held-out fractions, or start a run of its own from the "
            "checkpoint's weights"
        )


def parse_blend(source: str | Sequence[str]) -> tuple[list[Fraction] | None, list[str]]:
    """(weights, paths) of a data source; weights is None where none are given.

    Raises:
        ValueError: weights and paths do not alternate.
    """
    words = _words(source)
    if not words:
        raise ValueError("no data source is given; name a file, a token file's PREFIX, or 'demo'")
    if _number(words[0]) is None or len(words) == 1:
        return None, words
    weights = [_number(word) for word in words[::2]]
    if len(words) % 2 or None in weights:
        raise ValueError(f"{' '.join(words)!r} is no blend: weights and paths alternate, as in '0.3 path1 0.7 path2'")
    found = [weight for weight in weights if weight is not None]
    if any(weight <= 0 for weight in found):
        raise ValueError(f"the blend's weights {words[::2]} must all be above 0; leave out a path of weight 0")
    return found, words[1::2]


def _words(source: str | Sequence[str]) -> list[str]:
    if not isinstance(source, str):
        return [str(word) for word in source]
    first = source.split(maxsplit=1)[:1]
    return source.split() if first and _number(first[0]) is not None else [source] if source else []


def _number(word: str) -> Fraction | None:
    try:
        return Fraction(word)
    except (ValueError, ZeroDivisionError):
        return None


def _tokenizer(spec: DataSpec, folder: Path) -> TextTokenizer | None:
    name = spec.tokenizer
    if name is None and spec.source == DEMO:
        name = DEMO
    if name is None:
        return None
    tokenizer = load_tokenizer(name, folder)
    check_vocabulary(tokenizer, spec.vocab_size)
    return tokenizer


def _open_corpus(
    path: str, spec: DataSpec, tokenizer: TextTokenizer | None, folder: Path
) -> tuple[indexed.IndexedDataset, CorpusInfo]:
    prefix = Path(path.removesuffix(".bin").removesuffix(".idx"))
    if not indexed.exists(prefix):
        prefix = _cached_corpus(path, spec, tokenizer, folder)
    dataset = indexed.IndexedDataset(prefix)
    info = corpus_info(dataset, folder)
    check_corpus(dataset, info, spec.vocab_size, tokenizer)
    return dataset, info


def _cached_corpus(path: str, spec: DataSpec, tokenizer: TextTokenizer | None, folder: Path) -> Path:
    """Tokenise a text source into the cache, unless it is there."""
    if path.endswith((".bin", ".idx")):
        raise ValueError(f"token file {path!r} does not exist; it is a pair of PREFIX.bin and PREFIX.idx")
    if tokenizer is None:
        raise ValueError(
            f"data source {path!r} is text (there is no {path}.bin and .idx), and no tokenizer is named: "
            "set --tokenizer (a folder, a Hugging Face name, or 'demo')"
        )
    state = hashlib.sha256("".join(demo_texts()).encode()).hexdigest() if path == DEMO else source_state(path)
    plan_key = cache.fingerprint(_CACHE_VERSION, path, state)
    finished = folder / f"corpus-{cache.fingerprint(plan_key, tokenizer.behaviour, spec.text_key)}"
    if not finished.is_dir():
        temporary = cache.temporary_beside(finished)
        job = TokenizeJob(tokenizer=tokenizer.name, cache_dir=str(folder), text_key=spec.text_key)
        try:
            prepare_corpus(plan_units(path), job, temporary / "tokens", plan_key=plan_key)
            cache.publish_folder(temporary, finished)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return finished / "tokens"


def _component(
    path: str,
    dataset: indexed.IndexedDataset,
    info: CorpusInfo,
    spec: DataSpec,
    tokenizer: TextTokenizer | None,
    folder: Path,
) -> tuple[GPTDataset | None, ...]:
    """Training, evaluation and test set of one corpus."""
    corpus: Corpus = dataset
    name = f"data source {path}"
    fractions = (spec.eval_fraction, spec.test_fraction)
    if len(dataset) == 1 and 0 < sum(fractions) < 1:
        corpus, parts = _cut_document(dataset, fractions)
    else:
        parts = split_documents(len(dataset), fractions, folder, name)
    pad_id = tokenizer.pad_id if tokenizer is not None and tokenizer.pad_id is not None else 0

    def samples(documents: np.ndarray, seed: int | None) -> GPTDataset:
        return GPTDataset(
            corpus,
            documents,
            seq_length=spec.seq_length,
            seed=seed,
            reset_attention=spec.reset_attention,
            pad_id=pad_id,
            cache_dir=folder,
            content=info.content,
        )

    sets: list[GPTDataset | None] = []
    for which, part, seed in zip(_SETS, parts, (spec.seed, None, None), strict=True):
        try:
            sets.append(samples(part, seed) if len(part) else None)
        except ValueError as error:
            raise ValueError(f"{name}: the {which} set is {error}; {_more_for(which, spec)}") from error
    return tuple(sets)


def _cut_document(
    dataset: indexed.IndexedDataset, fractions: Sequence[float]
) -> tuple[CutDocument, list[NDArray[np.integer]]]:
    """A single long text: its end is held out. The document as its parts, and which of them each set has."""
    shares = [1 - sum(fractions), *fractions]
    present = [share for share in shares if share]
    starts = [round(dataset.num_tokens * (1 - sum(present[place:]))) for place in range(len(present))]
    numbers = iter(range(len(present)))
    parts: list[NDArray[np.integer]] = [np.array([next(numbers)] if share else [], dtype=np.int64) for share in shares]
    return CutDocument(dataset, [0, *starts[1:]]), parts


def _more_for(which: str, spec: DataSpec) -> str:
    """How a set gets enough tokens."""
    keys = {"evaluation": "hybrid.data.eval_fraction", "test": "hybrid.data.test_fraction"}
    values = {"evaluation": spec.eval_fraction, "test": spec.test_fraction}
    if which in keys:
        return f"give more text, or set {keys[which]}, which is {values[which]}, to 0 or to more"
    held_out = " and ".join(f"{key} {values[name]}" for name, key in keys.items() if values[name])
    return "give more text" + (f", or hold less of it out: {held_out}" if held_out else "")


def _build_indexes(
    train: Sequence[GPTDataset | None],
    evaluation: Sequence[GPTDataset | None],
    test: Sequence[GPTDataset | None],
    weights: Sequence[Fraction] | None,
    train_samples: int,
) -> None:
    """Build the large indexes of a run up front, so that ranks neither wait for them later nor build them twice."""
    for held_out in (*evaluation, *test):
        if held_out is not None:
            held_out.build(len(held_out))
    present = [part for part in train if part is not None]
    shares = [Fraction(len(part)) for part in present] if weights is None else weights
    for part, share in zip(present, shares, strict=True):
        part.build(ceil(share / sum(shares) * train_samples))


def _blend(sources: Sequence[SampleSource], weights: Sequence[Fraction] | None) -> SampleSource:
    if len(sources) == 1:
        return sources[0]
    return BlendedDataset.by_size(sources) if weights is None else BlendedDataset(sources, weights)


def _fingerprint(spec: DataSpec, infos: Sequence[CorpusInfo], weights: Sequence[Fraction] | None) -> str:
    return cache.fingerprint(
        [info.content for info in infos],
        [str(weight) for weight in weights or ()],
        spec.seq_length,
        spec.seed,
        spec.eval_fraction,
        spec.test_fraction,
        spec.reset_attention,
    )
