"""What every script of a run does before torch is imported: check the configuration, start the ranks if need be."""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from hybrid.config.describe import describe
from hybrid.config.errors import ConfigError
from hybrid.config.run import RunConfig
from hybrid.environment import LaunchError, normalise_launch_variables, prepare_process
from hybrid.launcher import should_spawn, spawn_ranks, this_command
from hybrid.output import say

Resolve = Callable[[argparse.Namespace, int | None], RunConfig]
"""The run that arguments ask for in a world of so many ranks; None where that is not known."""

Explain = Callable[[RunConfig], str]
"""What a dry run prints."""


def run_or_exit_code(
    program: str, args: argparse.Namespace, resolve: Resolve, explain: Explain = describe
) -> RunConfig | int:
    """The run of this rank, or the exit code where nothing is left to do: a dry run, an error, ranks that have ended.

    After a run, torch may be imported.
    """
    try:
        normalise_launch_variables()
        world_size = int(os.environ["WORLD_SIZE"])
        if args.dry_run:
            text = explain(resolve(args, None))
            say(text)
            return 0
        if world_size == 1:
            # Of one process it is not known yet how many ranks it stands for: as many as the model needs.
            ranks = resolve(args, None).parallel.world_size
            if should_spawn(ranks):
                return spawn_ranks(ranks, this_command())
        run = resolve(args, world_size)
    except (ConfigError, LaunchError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"{program}: {error}", file=sys.stderr)
        return 2
    logging.raiseExceptions = False  # a line that a full disk refuses, DeepSpeed's too, is worth no traceback
    prepare_process(tensor_parallel=run.parallel.tensor_model_parallel_size > 1)
    return run


def leave(main: Callable[[], int]) -> NoReturn:
    """Run a script's `main` and end the process with its exit code, without taking the interpreter down.

    There gloo's threads abort the process if a peer closed its connections a moment earlier, and the launcher would
    read the abort as this rank's failure.
    """
    try:
        code = main()
    except SystemExit:
        raise
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()  # of trackers, which send what they hold
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # of a process started without it
            with suppress(OSError):  # what cannot be written has been said, or cannot be
                stream.flush()
    os._exit(code)
