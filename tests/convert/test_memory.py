"""The peak of anonymous memory of a conversion, in processes of its own."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MB = 10**6


def test_no_more_than_chunks_are_in_memory(tmp_path):
    """About 400 MB in 8 shards, whose largest tensor has 131 MB: a part of one of them would be seen."""
    script = [sys.executable, "benchmarks/convert.py", "--layers", "2", "--rounds", "1", "--json"]
    done = subprocess.run([*script, "--folder", tmp_path], cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True)
    figures = json.loads(done.stdout)
    assert figures["bytes"] > 400 * MB and figures["largest"] == 32000 * 2048 * 2
    # The measure sees what a script holds that loads the model and copies the parts it writes.
    assert figures["peaks"]["naive"] > 150 * MB
    for direction in ("to-sharded", "to-hf"):
        assert figures["peaks"][direction] < 40 * MB
