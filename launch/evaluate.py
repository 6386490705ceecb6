"""Loss and completions: deepspeed launch/evaluate.py --ds_config z2_tp2 --init_from DIR --data FILE --prompt TEXT"""

from __future__ import annotations

import json
import os

from hybrid.config.cli import EITHER_DATA, add_arguments, add_finetune_arguments
from hybrid.config.parser import ArgumentParser
from hybrid.entry import leave, run_or_exit_code
from hybrid.finetune.arguments import add_evaluation_arguments, evaluation_config
from hybrid.output import say


def main() -> int:
    """Parse, check, start the ranks if need be, evaluate; the exit code."""
    parser = ArgumentParser(description=__doc__)
    add_arguments(parser, EITHER_DATA)
    add_finetune_arguments(parser)
    add_evaluation_arguments(parser)
    args = parser.parse_args()
    run = run_or_exit_code("evaluate", args, evaluation_config)
    if isinstance(run, int):
        return run
    # Only now: importing torch and DeepSpeed takes seconds, which a wrong configuration should not cost.
    from hybrid.agreement import EXIT_REFUSED
    from hybrid.evaluation import Request, run_evaluation
    from hybrid.generate.sampling import Sampling

    request = Request(
        # Prompts alone do not ask for the loss on whatever the configuration names.
        loss=args.data is not None or args.split != "all" or not args.prompt,
        split=args.split,
        prompts=tuple(args.prompt),
        max_new_tokens=args.max_new_tokens,
        sampling=Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p),
        seed=run.hybrid.training.seed,
    )
    results = run_evaluation(run, request)
    if results is None:
        return EXIT_REFUSED
    if os.environ.get("RANK", "0") == "0":
        say(json.dumps(results, indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    leave(main)
