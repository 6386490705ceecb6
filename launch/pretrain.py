"""Pretrain a LLaMA: deepspeed launch/pretrain.py --ds_config ds_configs/z2_tp2.json"""

from __future__ import annotations

from hybrid.config.cli import add_arguments, run_config_from_args
from hybrid.config.parser import ArgumentParser
from hybrid.entry import leave, run_or_exit_code
from hybrid.planner.banner import dry_run


def main() -> int:
    """Parse, check, start the ranks if need be, train; the exit code."""
    parser = ArgumentParser(description=__doc__)
    add_arguments(parser)
    run = run_or_exit_code("pretrain", parser.parse_args(), run_config_from_args, dry_run)
    if isinstance(run, int):
        return run
    # Only now: importing torch and DeepSpeed takes seconds, which a wrong configuration should not cost.
    from hybrid.session import run_training

    return run_training(run)


if __name__ == "__main__":
    leave(main)
