"""Fine-tune a LLaMA: deepspeed launch/finetune.py --ds_config z2_tp2 --init_from HF_DIR --data chat.jsonl"""

from __future__ import annotations

from hybrid.config.cli import CHAT_DATA, add_arguments, add_finetune_arguments
from hybrid.config.parser import ArgumentParser
from hybrid.entry import leave, run_or_exit_code
from hybrid.finetune.arguments import finetune_config
from hybrid.planner.banner import dry_run


def main() -> int:
    """Parse, check, start the ranks if need be, train; the exit code."""
    parser = ArgumentParser(description=__doc__)
    add_arguments(parser, CHAT_DATA)
    add_finetune_arguments(parser)
    parser.add_argument(
        "--show_samples", type=int, default=0, metavar="N", help="print N samples, what is learnt in colour"
    )
    args = parser.parse_args()
    run = run_or_exit_code("finetune", args, finetune_config, dry_run)
    if isinstance(run, int):
        return run
    # Only now: importing torch and DeepSpeed takes seconds, which a wrong configuration should not cost.
    from hybrid.finetune.data import chat_data
    from hybrid.session import run_training

    return run_training(run, chat_data(args.show_samples), keep_best=run.hybrid.finetune.keep_best)


if __name__ == "__main__":
    leave(main)
