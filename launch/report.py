"""One HTML file on one run or several: python launch/report.py RUN [RUN2 ...] --output report.html"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from hybrid.config.errors import ConfigError
from hybrid.config.parser import ArgumentParser
from hybrid.config.places import check_file, unwritable
from hybrid.output import say

_PAGE = "report.html"


def _target(output: Path | None, first: Path) -> Path:
    """The HTML file to write.

    Raises:
        ConfigError: `output` is neither an HTML file in a folder that exists nor such a folder, or cannot be written.
    """
    if output is None:
        return first / _PAGE
    if output.is_dir():
        output = output / _PAGE
    if output.suffix.lower() != ".html":
        page = output.with_name(output.stem + ".html")
        raise ConfigError([f"--output {output} is no .html file and no folder: the report is HTML, as {page}"])
    check_file("--output", output, _PAGE)
    return output


def main() -> int:
    """Parse, read, draw; the exit code."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output folder of a run")
    parser.add_argument("--output", type=Path, help="HTML file to write, or a folder for it (default: the first RUN)")
    args = parser.parse_args()
    try:
        output = _target(args.output, args.runs[0])
    except ConfigError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
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
    try:
        written = write_report(runs, output)
    except OSError as error:
        print(f"report: {unwritable('--output', output, error)}", file=sys.stderr)
        return 2
    for path in written:
        say(str(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
