"""Pretrain a LLaMA: deepspeed launch/pretrain.py --ds_config ds_configs/z2_tp2.json"""

from __future__ import annotations

import argparse
import os
import sys

from hybrid.config.cli import add_arguments, run_config_from_args
from hybrid.config.describe import describe
from hybrid.config.errors import ConfigError
from hybrid.environment import LaunchError, normalise_launch_variables, prepare_process
from hybrid.launcher import should_spawn, spawn_ranks, this_command


def main() -> int:
    """Parse, check, start the ranks if need be, train; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    try:
        normalise_launch_variables()
        world_size = int(os.environ["WORLD_SIZE"])
        if args.dry_run:
            print(describe(run_config_from_args(args, None)))
            return 0
        if world_size == 1:
            # Of one process it is not known yet how many ranks it stands for: as many as the model needs.
            ranks = run_config_from_args(args, None).parallel.world_size
            if should_spawn(ranks):
                return spawn_ranks(ranks, this_command())
        run = run_config_from_args(args, world_size)
    except (ConfigError, LaunchError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"pretrain: {error}", file=sys.stderr)
        return 2

    prepare_process()
    # Only now: importing torch and DeepSpeed takes seconds, which a wrong configuration should not cost.
    from hybrid.trainer import run_training

    run_training(run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
