"""One HTML file on one run or several: python launch/report.py RUN [RUN2 ...] --output report.html"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from hybrid.config.errors import ConfigError
from hybrid.config.parser import ArgumentParser


def main() -> int:
    """Parse, read, draw; the exit code."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output folder of a run")
    parser.add_argument("--output", type=Path, help="HTML file to write (default: RUN/report.html of the first)")
    args = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        print("report: matplotlib is missing: pip install 'hybrid-llama[plot]'", file=sys.stderr)
        return 2
    from hybrid.report.data import load_run
    from hybrid.report.page import write_report

    try:
        runs = [load_run(path) for path in args.runs]
    except ConfigError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    for path in write_report(runs, args.output or args.runs[0] / "report.html"):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
