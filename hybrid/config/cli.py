"""The command-line arguments of every training script."""

from __future__ import annotations

import argparse
from typing import Any

from hybrid.config.errors import ConfigError
from hybrid.config.load import load_config, shipped_configs
from hybrid.config.overrides import FINETUNE_FLAGS, FLAGS
from hybrid.config.run import RunConfig

_HELP = {
    "train_steps": "optimizer steps of the whole run",
    "seq_length": "tokens per sample",
    "model": "preset, folder with a config.json, JSON file or hub name",
    "tokenizer": "folder or name of a Hugging Face tokenizer",
    "output_dir": "folder for metrics, checkpoints and the final model",
    "seed": "of weights, sample order and dropout",
    "resume": "auto (default: the newest complete checkpoint), latest (also without a value), none, or a folder",
    "init_from": "weights to start from: a Hugging Face folder or hub name, or a sharded or training checkpoint",
    "save_every": "steps between checkpoints; 0: only at the end",
    "keep_last": "delete all but the newest so many checkpoints; 0: keep all",
    "keep_every": "never delete checkpoints of a multiple of so many steps",
    "stop_after_steps": "save and end this launch after so many steps; train_steps stays",
    "max_wall_time": "save and end this launch after so much time, in seconds or as H:MM:SS",
    "eval_every": "steps between evaluations; 0: never",
}

_WHOLE_NUMBERS = (
    "train_steps", "seq_length", "seed", "save_every", "keep_last", "keep_every", "stop_after_steps", "eval_every",
)  # fmt: skip


TEXT_DATA = (
    "demo (text of the standard library), or .jsonl, .txt or .parquet files, or a blend: WEIGHT PATH WEIGHT PATH ..."
)
CHAT_DATA = "demo (short chats about sums), or files or a Hugging Face dataset of conversations"
EITHER_DATA = (
    "text or conversations, by the first row. demo is the text that pretrain.py learns; with --format messages it is "
    "the chats that finetune.py learns"
)
"""What `--data` takes, script by script."""


def add_arguments(parser: argparse.ArgumentParser, data: str = TEXT_DATA) -> None:
    """Add `--ds_config`, a flag for each common key, `--set` and `--dry_run`; `data` says what `--data` takes."""
    parser.add_argument(
        "--ds_config",
        "--deepspeed_config",
        required=True,
        metavar="FILE|NAME",
        help=f"configuration file, or a shipped one: {', '.join(shipped_configs())}",
    )
    for flag, path in FLAGS.items():
        kind = int if flag in _WHOLE_NUMBERS else str
        help_text = f"{data if flag == 'data' else _HELP[flag]} ({path})"
        if flag == "data":
            parser.add_argument("--data", nargs="+", metavar="SOURCE", help=help_text)
        elif flag == "resume":
            parser.add_argument("--resume", nargs="?", const="latest", metavar="CHECKPOINT", help=help_text)
        else:
            parser.add_argument(f"--{flag}", type=kind, help=help_text)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="PATH=JSON",
        help="set any key of the file, as in --set bf16.enabled=false; repeatable, applied after the flags",
    )
    parser.add_argument("--dry_run", action="store_true", help="print the resolved configuration and the rank map")
    parser.add_argument("--world_size", type=int, metavar="RANKS", help="with --dry_run: the ranks to plan for")
    # The usual DeepSpeed command line has it.
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    # Launchers of DeepSpeed and torch before 2.0 add it; the environment says the same.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)


_FINETUNE_HELP = {
    "format": "messages, prompt_completion, alpaca or sharegpt; auto: by the first row",
    "eval_data": "held-out rows; otherwise a share of the data (hybrid.data.eval_fraction)",
    "chat_template": "none, chatml, llama2, llama3, mistral, zephyr or a file; otherwise the tokenizer's own",
    "train_on": "all turns of the assistant, or the last",
    "packing": "several samples in a row, none of which sees another",
    "too_long": "samples of more than seq_length tokens: error, drop or truncate",
    "resize_vocab": "give the model rows for tokens it has none for",
}


def add_finetune_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of fine-tuning data."""
    for flag, path in FINETUNE_FLAGS.items():
        help_text = f"{_FINETUNE_HELP[flag]} ({path})"
        if flag == "packing":
            parser.add_argument("--packing", action=argparse.BooleanOptionalAction, help=help_text)
        elif flag == "resize_vocab":
            parser.add_argument("--resize_vocab", action="store_true", default=None, help=help_text)
        elif flag == "eval_data":
            parser.add_argument("--eval_data", nargs="+", metavar="SOURCE", help=help_text)
        else:
            parser.add_argument(f"--{flag}", help=help_text)


def run_config_from_args(args: argparse.Namespace, world_size: int | None) -> RunConfig:
    """The run that parsed arguments ask for.

    Args:
        world_size: ranks of the running world; None if there is none, as in a dry run.

    Raises:
        ConfigError: lists everything that is wrong.
    """
    if args.world_size is not None:
        if not args.dry_run:
            raise ConfigError(["--world_size only goes with --dry_run: the launcher sets the ranks of a run"])
        if args.world_size < 1:
            raise ConfigError([f"--world_size is {args.world_size}: it must be at least 1"])
        world_size = args.world_size
    flags: dict[str, Any] = {flag: getattr(args, flag, None) for flag in (*FLAGS, *FINETUNE_FLAGS)}
    for flag in ("data", "eval_data"):
        if flags[flag] is not None and len(flags[flag]) == 1:
            flags[flag] = flags[flag][0]
    return load_config(args.ds_config, args.overrides, flags, world_size)
