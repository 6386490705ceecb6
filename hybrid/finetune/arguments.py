"""From the arguments of fine-tuning and evaluation to a run; needs no torch."""

from __future__ import annotations

import argparse
import math

from hybrid.config.cli import run_config_from_args
from hybrid.config.errors import ConfigError
from hybrid.config.run import RunConfig
from hybrid.convert.hub import fetch
from hybrid.convert.misplaced import check_place
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
        check_place(folder)
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


def add_evaluation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to evaluate on, what to complete, and how."""
    parser.add_argument(
        "--split",
        choices=["all", "train", "eval", "test"],
        default="all",
        help="all of the data, or what a run with the same hybrid.data fractions has for it (default: %(default)s)",
    )
    group = parser.add_argument_group("completions")
    group.add_argument("--prompt", nargs="+", default=[], metavar="TEXT", help="texts to complete")
    group.add_argument("--max_new_tokens", type=int, default=64, help="(default: %(default)s)")
    group.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token (default: %(default)s)")
    group.add_argument("--top_k", type=int, default=0, help="only the k likeliest; 0: all (default: %(default)s)")
    group.add_argument("--top_p", type=float, default=1.0, help="only the likeliest of this probability together")


def evaluation_config(args: argparse.Namespace, world_size: int | None) -> RunConfig:
    """As `finetune_config`, with weights, with something held out for `--split` where that names a held-out set, and
    with completions that can be made.

    Raises:
        ConfigError: lists everything that is wrong.
    """
    run = finetune_config(args, world_size)
    data, options = run.hybrid.data, run.hybrid.finetune
    held_out = {"eval": data.eval_fraction or options.eval_data, "test": data.test_fraction}
    problems = _completion_problems(args)
    if run.hybrid.init_from is None:
        problems.append(
            "hybrid.init_from is null, and random weights are not worth evaluating: name a model or a checkpoint with "
            "--init_from"
        )
    if not held_out.get(args.split, True):
        key = f"hybrid.data.{args.split}_fraction"
        problems.append(f"--split {args.split}, but {key} is 0: set it to what the model was trained with")
    if problems:
        raise ConfigError(problems, "the arguments")
    return run


def _completion_problems(args: argparse.Namespace) -> list[str]:
    """What is wrong with the way prompts are to be completed."""
    problems = []
    if not 0 <= args.temperature < math.inf:
        problems.append(
            f"--temperature is {args.temperature:g}: it must be at least 0; 0 takes the likeliest token, and 1 samples "
            "from the model as it is"
        )
    if args.top_k < 0:
        problems.append(f"--top_k is {args.top_k}: it must be at least 0; 0 keeps all tokens")
    if not 0 < args.top_p <= 1:
        problems.append(f"--top_p is {args.top_p:g}: it must be above 0 and at most 1; 1 keeps all tokens")
    if args.max_new_tokens < 1:
        problems.append(f"--max_new_tokens is {args.max_new_tokens}: it must be at least 1")
    return problems


def _tokenizer_size(run: RunConfig) -> int:
    assert run.hybrid.tokenizer is not None
    try:
        return load_tokenizer(run.hybrid.tokenizer, run.hybrid.data.cache_dir or default_cache_dir()).size
    except ValueError as error:
        raise ConfigError([str(error)]) from error
