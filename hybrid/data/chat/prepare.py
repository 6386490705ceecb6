"""Conversations of a source as one flat array of tokens with a mask, made at first use and then found."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hybrid.data import cache
from hybrid.data.chat.demo import demo_rows
from hybrid.data.chat.formats import Format, detect_format, parse_conversation
from hybrid.data.chat.masks import ChatEncoder, Encoded, TrainOn
from hybrid.data.chat.rows import Row, read_rows, short_place
from hybrid.data.chat.tokenizer import ChatTokenizer
from hybrid.data.sources import source_state
from hybrid.data.tokenizer import DEMO

logger = logging.getLogger(__name__)

TooLong = Literal["error", "drop", "truncate"]
"""What happens to a sample of more than `seq_length` tokens."""

NO_TARGET = "without a target"
TOO_LONG = "too long"
TRUNCATED = "truncated"
_CACHE_VERSION = 1
_NAMED = 20


@dataclass(frozen=True, kw_only=True)
class Options:
    """How rows become samples."""

    form: Format | None
    """None: detected from the first row."""
    train_on: TrainOn
    seq_length: int
    too_long: TooLong


@dataclass
class Report:
    """What became of the rows of a source."""

    form: str = ""
    rows: int = 0
    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    merged: int = 0
    longest: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Rows that were left out or cut, by reason."""
    places: dict[str, list[str]] = field(default_factory=dict)
    """The first of them, by reason."""
    ends: Counter[int] = field(default_factory=Counter)
    """The tokens that supervised turns end with."""
    content: str = ""
    """A hash of all tokens and masks."""

    def note(self, reason: str, where: str) -> None:
        """Count a row."""
        self.counts[reason] += 1
        places = self.places.setdefault(reason, [])
        if len(places) < _NAMED:
            places.append(short_place(where))

    def named(self, reason: str) -> str:
        """The rows of a reason, the first by name."""
        more = self.counts[reason] - len(self.places[reason])
        return ", ".join(self.places[reason]) + (f" and {more} more" if more else "")


@dataclass(frozen=True, kw_only=True)
class ChatCorpus:
    """The samples of a source: sample k is `tokens[starts[k]:starts[k + 1]]`, and `supervised` alike."""

    tokens: NDArray[np.int32]
    supervised: NDArray[np.bool_]
    starts: NDArray[np.int64]
    report: Report

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample."""
        return np.diff(self.starts)

    def sample(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """(token ids, mask) of a sample."""
        part = slice(int(self.starts[index]), int(self.starts[index + 1]))
        return self.tokens[part], self.supervised[part]


def open_corpus(sources: Sequence[str], tokenizer: ChatTokenizer, options: Options, cache_dir: Path) -> ChatCorpus:
    """The samples of all rows of `sources`, in order.

    Raises:
        ValueError: a row is faulty (named by file and line), none has a target, or one is too long and nothing was
            said about those.
    """
    state = [(source, "" if source == DEMO else source_state(source)) for source in sources]
    key = cache.fingerprint(_CACHE_VERSION, state, tokenizer.behaviour, asdict(options))
    folder = cache_dir / f"chat-{key}"
    if not folder.is_dir():
        corpus = _encode(_rows(sources), ChatEncoder(tokenizer, options.train_on), options)
        temporary = cache.temporary_beside(folder)
        try:
            _write(temporary, corpus)
            cache.publish_folder(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return _read(folder)


def _rows(sources: Sequence[str]) -> Iterable[Row]:
    for source in sources:
        yield from demo_rows() if source == DEMO else read_rows(source)


def _encode(rows: Iterable[Row], encoder: ChatEncoder, options: Options) -> ChatCorpus:
    report, form = Report(), options.form
    tokens, supervised, starts = array("i"), bytearray(), array("q", [0])
    for row in rows:
        report.rows += 1
        form = form or detect_format(row.fields, row.where)
        encoded = _fitting(encoder.encode(parse_conversation(row.fields, form, row.where), row.where), row, options)
        if encoded is None or not encoded.has_target:
            report.note(NO_TARGET if encoded is not None else TOO_LONG, row.where)
            continue
        if len(encoded.ids) > options.seq_length:
            report.note(TRUNCATED, row.where)
        length = min(len(encoded.ids), options.seq_length)
        tokens.extend(encoded.ids[:length])
        supervised.extend(encoded.supervised[:length])
        starts.append(len(tokens))
        report.supervised += sum(encoded.supervised[:length])
        report.merged += encoded.merged
        report.longest = max(report.longest, length)
        report.ends.update(encoded.ends)
    report.form, report.samples, report.tokens = form or "", len(starts) - 1, len(tokens)
    _check(report, options)
    flags = np.frombuffer(bytes(supervised), dtype=np.bool_)
    corpus = ChatCorpus(
        tokens=np.array(tokens, np.int32), supervised=flags, starts=np.array(starts, np.int64), report=report
    )
    digest = hashlib.sha256(corpus.tokens.tobytes() + corpus.starts.tobytes() + flags.tobytes())
    report.content = digest.hexdigest()[:16]
    return corpus


def _fitting(encoded: Encoded, row: Row, options: Options) -> Encoded | None:
    """The sample as it may be used: None where it is dropped; cut ones keep their ids until they are stored."""
    if len(encoded.ids) <= options.seq_length:
        return encoded
    if options.too_long == "error":
        raise ValueError(
            f"{row.where}: {len(encoded.ids)} tokens, and seq_length is {options.seq_length}: raise it "
            "(--seq_length), or say what becomes of such samples with hybrid.finetune.too_long: drop or truncate"
        )
    if options.too_long == "drop":
        return None
    cut = options.seq_length
    if not any(encoded.supervised[1:cut]):
        return Encoded(ids=encoded.ids[:cut], supervised=[False] * cut, ends=[])
    return encoded


def _check(report: Report, options: Options) -> None:
    if report.samples:
        return
    reasons = ", ".join(f"{count} {reason} ({report.named(reason)})" for reason, count in report.counts.items())
    raise ValueError(
        f"none of {report.rows} rows can be trained on: {reasons or 'the data is empty'}; a sample needs an answer of "
        f"the assistant within seq_length {options.seq_length}"
    )


def _write(folder: Path, corpus: ChatCorpus) -> None:
    folder.mkdir(parents=True)
    for name in ("tokens", "supervised", "starts"):
        np.save(folder / f"{name}.npy", getattr(corpus, name))
    cache.write_json(folder / "report.json", vars(corpus.report))


def _read(folder: Path) -> ChatCorpus:
    arrays: dict[str, Any] = {
        name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("tokens", "supervised", "starts")
    }
    stored = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    stored["counts"] = Counter(stored["counts"])
    stored["ends"] = Counter({int(token): count for token, count in stored["ends"].items()})
    return ChatCorpus(**arrays, report=Report(**stored))


def log_report(corpus: ChatCorpus, name: str, tokenizer: ChatTokenizer, method: str) -> None:
    """Say what was read, what was left out and why, and how turns end."""
    report = corpus.report
    logger.info(
        "%s: %s rows of format %s, template %s (%s): %s samples, %s tokens, %s of them supervised",
        name, report.rows, report.form, tokenizer.template_name, method, report.samples, report.tokens,
        report.supervised,
    )  # fmt: skip
    for reason, count in sorted(report.counts.items()):
        logger.warning("%s: %d rows %s: %s", name, count, reason, report.named(reason))
    if report.merged:
        logger.warning("%s: %d tokens hold both prompt and answer and are not supervised", name, report.merged)
    added = tokenizer.renderer.added_tokens_decoder
    unmarked = sum(count for token, count in report.ends.items() if token not in added and token != tokenizer.eos_id)
    if unmarked:
        logger.warning(
            "%s: %d turns end without an end token, so the model does not learn to stop: what template %s ends a turn "
            "with is no special token of tokenizer %s; add it to the tokenizer as one and train with --resize_vocab, "
            "or use a template that ends turns with the tokenizer's eos_token (--chat_template zephyr)",
            name, unmarked, tokenizer.template_name, tokenizer.name,
        )  # fmt: skip
