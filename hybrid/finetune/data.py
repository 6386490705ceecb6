"""The data of a fine-tuning run."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch.distributed as dist

from hybrid.config.run import RunConfig
from hybrid.data.chat.build import ChatModule, ChatSpec, build_chat_data
from hybrid.data.chat.show import show_samples

logger = logging.getLogger(__name__)


def chat_spec(run: RunConfig) -> ChatSpec:
    """The fine-tuning data that the configuration names."""
    data, options = run.hybrid.data, run.hybrid.finetune
    return ChatSpec(
        source=data.source,
        tokenizer=run.hybrid.tokenizer,
        seq_length=data.seq_length,
        vocab_size=run.model.vocab_size,
        seed=run.hybrid.training.seed,
        eval_source=options.eval_data,
        eval_fraction=data.eval_fraction,
        test_fraction=data.test_fraction,
        form=None if options.format == "auto" else options.format,
        chat_template=options.chat_template,
        train_on=options.train_on,
        packing=options.packing,
        too_long=options.too_long,
        cache_dir=data.cache_dir,
    )


def chat_data(show: int = 0) -> Callable[[RunConfig], ChatModule]:
    """A function that opens the data of a fine-tuning run, and prints `show` samples of it on rank 0."""

    def open_data(run: RunConfig) -> ChatModule:
        module = build_chat_data(chat_spec(run))
        if run.hybrid.init_from is None and dist.get_rank() == 0:
            logger.warning(
                "hybrid.init_from is null: unless this launch goes on from a checkpoint, it trains random weights; "
                "name the model to fine-tune with --init_from"
            )
        if show and dist.get_rank() == 0:
            print(*show_samples(module.train, module.tokenizer, show), sep="\n", flush=True)
        return module

    return open_data
