"""The examples for several nodes are read by the programs they are for."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml
from deepspeed.launcher.runner import fetch_hostfile

from hybrid.config.load import shipped_configs

LAUNCH = Path(__file__).parents[2] / "launch"
EXAMPLES = (LAUNCH / "slurm" / "pretrain.sbatch", LAUNCH / "hostfile", LAUNCH / "accelerate_two_nodes.yaml")


def test_the_batch_script_is_a_shell_script() -> None:
    subprocess.run(["bash", "-n", EXAMPLES[0]], check=True)
    assert "#SBATCH --signal=USR1@" in EXAMPLES[0].read_text()


def test_deepspeed_reads_the_hostfile() -> None:
    assert fetch_hostfile(str(EXAMPLES[1])) == {"node-1": 8, "node-2": 8}


def test_accelerate_reads_its_file() -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    config = ClusterConfig.from_yaml_file(EXAMPLES[2])
    assert (config.num_machines, config.num_processes) == (2, 16)
    assert yaml.safe_load(EXAMPLES[2].read_text())["main_process_port"] == 29500


def test_they_name_a_shipped_configuration() -> None:
    for path in EXAMPLES:
        assert set(re.findall(r"--ds_config (\S+)", path.read_text())) <= set(shipped_configs())
