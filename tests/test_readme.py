"""The README: its commands run, its configuration table is that of the code."""

import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.config_table import config_table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [block.splitlines() for block in re.findall(r"```bash\n(.*?)```", README, re.S)]
COMMANDS = [command for block in BLOCKS for command in block]

ELSEWHERE = {
    "pip install -e . && deepspeed launch/pretrain.py --ds_config ds_configs/z2_tp2.json": "tests/test_pretrain.py",
    "pip install -e '.[test]' && pytest": ".ci/run",
}
"""Commands that another test, or CI, runs."""

CLUSTER = {
    "deepspeed --hostfile launch/hostfile launch/pretrain.py --ds_config llama3_8b_tp4_pp2",
    "accelerate launch --config_file launch/accelerate_two_nodes.yaml launch/pretrain.py --ds_config llama3_8b_tp4_pp2",
    "sbatch launch/slurm/pretrain.sbatch",
}
"""Commands that need two nodes: tests/launch/test_examples.py reads their files."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder that looks like the repository, in which the commands can leave what they write."""
    folder = tmp_path_factory.mktemp("checkout")
    for entry in ("launch", "ds_configs", "examples"):
        (folder / entry).symlink_to(ROOT / entry)
    return folder


def run_in_order(commands, folder):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("OMP_NUM_THREADS", None)
    for command in commands:
        if command in ELSEWHERE or command in CLUSTER:
            continue
        done = subprocess.run(
            shlex.split(command), cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.timeout(900)
def test_the_commands_run_one_after_the_other(checkout):
    """In the order of the page up to the first models; what follows needs those, and nothing of another section."""
    first = next(i for i, block in enumerate(BLOCKS) if any("runs/short" in command for command in block)) + 1
    run_in_order(sum(BLOCKS[:first], []), checkout)
    with ThreadPoolExecutor(max_workers=2) as sections:
        list(sections.map(run_in_order, BLOCKS[first:], [checkout] * len(BLOCKS[first:])))


def test_what_runs_elsewhere_stands_in_the_readme():
    assert set(ELSEWHERE) | CLUSTER <= set(COMMANDS)
    assert "pip install -e '.[test]' && pytest;" in (ROOT / ".ci" / "run").read_text()


def test_the_configuration_table_is_that_of_the_code():
    assert "\n".join(config_table()) in README


def test_every_launch_script_is_mentioned():
    for script in sorted((ROOT / "launch").glob("*.py")):
        assert f"launch/{script.name}" in README
