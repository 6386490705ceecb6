"""What the data of a pretraining run are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid.config.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """The data of a run."""

    source: str | Sequence[str]
    """`demo`; a text file, folder or glob; the PREFIX of a token file; or a blend `w1 path1 w2 path2 ...`, as one
    string or as a list. Paths without weights are blended by size."""
    tokenizer: str | None
    """A folder, a Hugging Face name or `demo`; None is right for token files and for the demo."""
    seq_length: int
    """Tokens per sample."""
    vocab_size: int
    """Ids the model has."""
    seed: int
    eval_fraction: float = 0.0
    """Share of the documents held out for evaluation."""
    test_fraction: float = 0.0
    """Share of the documents held out from both."""
    cache_dir: str | None = None
    """Where prepared text and indexes are kept; None is `~/.cache/hybrid`."""
    text_key: str = "text"
    """The field of a JSONL object or parquet row that holds the text."""
    train_samples: int = 1
    """Samples the run will take: large indexes of all the epochs they span are built by `build_data`, not later."""
    reset_attention: bool = False
    """Samples also say where documents start; see `GPTDataset`."""


def text_spec(run: RunConfig) -> DataSpec:
    """The pretraining data that the configuration names."""
    hybrid = run.hybrid
    return DataSpec(
        source=hybrid.data.source,
        tokenizer=hybrid.tokenizer,
        seq_length=hybrid.data.seq_length,
        vocab_size=run.model.vocab_size,
        seed=hybrid.training.seed,
        eval_fraction=hybrid.data.eval_fraction,
        test_fraction=hybrid.data.test_fraction,
        cache_dir=hybrid.data.cache_dir,
        text_key=hybrid.data.text_key,
        reset_attention=hybrid.data.reset_attention,
        train_samples=run.train_samples,
    )
