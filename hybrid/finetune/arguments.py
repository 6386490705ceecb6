"""From the arguments of fine-tuning and evaluation to a run; needs no torch."""

from __future__ import annotations

import argparse

from hybrid.config.cli import run_config_from_args
from hybrid.config.errors import ConfigError
from hybrid.config.run import RunConfig
from hybrid.convert.hub import fetch
from hybrid.data.cache import default_cache_dir
from hybrid.data.tokenizer import load_tokenizer

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def finetune_config(args: argparse.Namespace, world_size: int | None) -> RunConfig:
    """The run that parsed arguments ask for; model and tokenizer are those of `--init_from` unless others are named.

    Raises:
        ConfigError: lists everything that is wrong.
    """
    if args.init_from is not None:
        folder = fetch(args.init_from)
        args.init_from = str(folder)
        args.model = args.model or str(folder)
        if args.tokenizer is None and any((folder / name).is_file() for name in _TOKENIZER_FILES):
            args.tokenizer = str(folder)
    run = run_config_from_args(args, world_size)
    if not run.hybrid.finetune.resize_vocab or run.hybrid.tokenizer is None:
        return run
    size = _tokenizer_size(run)
    if size <= run.model.vocab_size:
        return run
    args.overrides = [*args.overrides, f"hybrid.model.vocab_size={size}"]
    return run_config_from_args(args, world_size)


def evaluation_config(args: argparse.Namespace, world_size: int | None) -> RunConfig:
    """As `finetune_config`, with something held out for `--split` where that names a held-out set.

    Raises:
        ConfigError: lists everything that is wrong.
    """
    run = finetune_config(args, world_size)
    data, options = run.hybrid.data, run.hybrid.finetune
    held_out = {"eval": data.eval_fraction or options.eval_data, "test": data.test_fraction}
    if not held_out.get(args.split, True):
        key = f"hybrid.data.{args.split}_fraction"
        raise ConfigError([f"--split {args.split}, but {key} is 0: set it to what the model was trained with"])
    return run


def _tokenizer_size(run: RunConfig) -> int:
    assert run.hybrid.tokenizer is not None
    try:
        return load_tokenizer(run.hybrid.tokenizer, run.hybrid.data.cache_dir or default_cache_dir()).size
    except ValueError as error:
        raise ConfigError([str(error)]) from error
