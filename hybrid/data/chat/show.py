"""Samples for a person to look at, what the model learns to write in colour."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import groupby

from hybrid.data.chat.dataset import ChatDataset
from hybrid.data.chat.tokenizer import ChatTokenizer

_GREEN, _DIM, _RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"


def show_samples(dataset: ChatDataset, tokenizer: ChatTokenizer, count: int) -> Iterator[str]:
    """Lines of text: the first samples decoded, supervised tokens green (`[[...]]` where NO_COLOR is set), the rest
    dim."""
    before, after, other = ("[[", "]]", ("", "")) if os.environ.get("NO_COLOR") else (_GREEN, _RESET, (_DIM, _RESET))
    corpus = dataset.corpus
    members = sorted(dataset.packs.members.tolist())[:count]
    for number, member in enumerate(members, start=1):
        ids, supervised = corpus.sample(member)
        learnt = int(supervised.sum())
        yield f"sample {number} of {len(dataset.packs.members)}: {len(ids)} tokens, {learnt} supervised"
        parts = []
        for flag, run in groupby(zip(supervised.tolist(), ids.tolist(), strict=True), key=lambda pair: pair[0]):
            text = tokenizer.decode([token for _, token in run])
            parts.append(f"{before}{text}{after}" if flag else f"{other[0]}{text}{other[1]}")
        yield "".join(parts)
