"""Loss and completions: deepspeed launch/evaluate.py --ds_config z2_tp2 --init_from DIR --data FILE --prompt TEXT"""

from __future__ import annotations

import json
import os

from hybrid.config.cli import EITHER_DATA, add_arguments, add_finetune_arguments
from hybrid.config.parser import ArgumentParser
from hybrid.entry import leave, run_or_exit_code
from hybrid.finetune.arguments import evaluation_config


def main() -> int:
    """Parse, check, start the ranks if need be, evaluate; the exit code."""
    parser = ArgumentParser(description=__doc__)
    add_arguments(parser, EITHER_DATA)
    add_finetune_arguments(parser)
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
    args = parser.parse_args()
    run = run_or_exit_code("evaluate", args, evaluation_config)
    if isinstance(run, int):
        return run
    # Only now: importing torch and DeepSpeed takes seconds, which a wrong configuration should not cost.
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
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(results, indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    leave(main)
