"""Launch variables, threads, and the start of torch.distributed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybrid import environment
from hybrid.environment import (
    LaunchError,
    compute_capability,
    connections_in_words,
    first_host,
    gpu_is_present,
    normalise_launch_variables,
    prepare_process,
)

ROOT = Path(environment.__file__).parents[1]


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("node1", "node1"),
        ("node[01-03,07]", "node01"),
        ("gpu-a[7,9-12],gpu-b3", "gpu-a7"),
        ("a.example.org,b.example.org", "a.example.org"),
        ("r[2,4]c[10-11]", "r2c10"),
        ("rack[1-2]-n5", "rack1-n5"),
    ],
)
def test_first_host_of_a_node_list(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


@pytest.mark.parametrize("node_list", ["", "node[1-2", ",node1"])
def test_a_broken_node_list_is_refused(node_list: str) -> None:
    with pytest.raises(LaunchError, match="set MASTER_ADDR"):
        first_host(node_list)


def test_one_process_without_a_launcher_is_a_world_of_one() -> None:
    environ: dict[str, str] = {}
    normalise_launch_variables(environ)
    assert int(environ.pop("MASTER_PORT")) > 0
    assert environ == {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


def test_torchrun_variables_stay_and_deepspeed_lacks_one() -> None:
    torchrun = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1234",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "2",
    }
    environ = dict(torchrun)
    normalise_launch_variables(environ)
    assert environ == torchrun
    del environ["LOCAL_WORLD_SIZE"]
    environ["LOCAL_SIZE"] = "4"
    normalise_launch_variables(environ)
    assert environ["LOCAL_WORLD_SIZE"] == "4"


SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "node[03-04]",
    "SLURM_JOB_ID": "1234567",
}


def test_srun_tasks_find_each_other() -> None:
    environ = dict(SLURM)
    normalise_launch_variables(environ)
    found = {name: environ[name] for name in environ if not name.startswith("SLURM")}
    assert found == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "node03",
        "MASTER_PORT": str(15000 + 1234567 % 15000),
    }


def test_the_shell_of_a_batch_script_is_not_a_task() -> None:
    shell = SLURM | {"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0"}
    task = shell | {"SLURM_STEP_ID": "0"}
    normalise_launch_variables(shell)
    normalise_launch_variables(task)
    assert (shell["WORLD_SIZE"], task["WORLD_SIZE"]) == ("1", "8")


def test_open_mpi_on_one_host_and_on_several() -> None:
    names = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "3", "LOCAL_SIZE": "4"}
    environ = {f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()}
    several = environ | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    normalise_launch_variables(environ)
    found = [environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")]
    assert found == ["3", "4", "3", "4", "127.0.0.1"]
    with pytest.raises(LaunchError, match="MASTER_ADDR is not set"):
        normalise_launch_variables(several)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 but RANK is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is outside the world of WORLD_SIZE=2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "LOCAL_RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "MASTER_ADDR is not set"),
    ],
)
def test_an_inconsistent_environment_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        normalise_launch_variables(environ)


def test_gpus_are_found_by_their_device_files(tmp_path: Path) -> None:
    assert not gpu_is_present(tmp_path, {})
    (tmp_path / "nvidiactl").touch()
    assert not gpu_is_present(tmp_path, {})
    (tmp_path / "nvidia0").touch()
    assert gpu_is_present(tmp_path, {})
    assert gpu_is_present(tmp_path, {"CUDA_VISIBLE_DEVICES": "1"})
    assert not gpu_is_present(tmp_path, {"CUDA_VISIBLE_DEVICES": ""})
    assert not gpu_is_present(tmp_path, {"CUDA_VISIBLE_DEVICES": "-1"})


def test_ranks_share_the_cores_of_a_machine_without_gpu() -> None:
    cores = len(os.sched_getaffinity(0))
    world = {"RANK": "1", "WORLD_SIZE": str(10 * cores), "LOCAL_RANK": "1", "MASTER_ADDR": "h"}
    slurm = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x4)"}
    launches = [({}, 1), (world, 10 * cores), (world | {"LOCAL_SIZE": "2"}, 2), (slurm, 2)]
    for launch, ranks in launches:
        environ = {"CUDA_VISIBLE_DEVICES": ""} | launch
        prepare_process(environ)
        assert environ.pop("OMP_NUM_THREADS") == str(max(1, cores // ranks))
        assert environ == {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"} | launch
    chosen = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "7"}
    prepare_process(chosen)
    assert chosen["OMP_NUM_THREADS"] == "7"


def test_tensor_parallel_runs_on_gpus_have_one_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(
        present: bool, capability: int | None, given: dict[str, str], tensor_parallel: bool = True
    ) -> str | None:
        monkeypatch.setattr(environment, "gpu_is_present", lambda environ: present)
        monkeypatch.setattr(environment, "compute_capability", lambda: capability)
        environ = dict(given)
        prepare_process(environ, tensor_parallel=tensor_parallel)
        return environ.get("CUDA_DEVICE_MAX_CONNECTIONS")

    assert chosen(True, 9, {}) == chosen(True, None, {}) == "1"
    assert chosen(True, 10, {}) is None
    assert chosen(True, 9, {}, tensor_parallel=False) is None
    assert chosen(False, None, {}) is None
    assert chosen(True, 9, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}) == "8"
    assert "is 1: tensor-parallel" in connections_in_words({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert "is 8; before Blackwell, 1" in connections_in_words({"CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    assert "is not set; before Blackwell, 1" in connections_in_words({})


def test_the_compute_capability_is_asked_of_the_driver() -> None:
    assert compute_capability((sys.executable, "-c", "print('9.0\\n9.0')")) == 9
    assert compute_capability((sys.executable, "-c", "print('12.0')")) == 12
    assert compute_capability((sys.executable, "-c", "print('No devices were found')")) is None
    assert compute_capability((sys.executable, "-c", "raise SystemExit(9)")) is None
    assert compute_capability(("no-such-tool-of-a-driver",)) is None


def test_a_stale_build_lock_does_not_delay_the_start(tmp_path: Path) -> None:
    """A killed build leaves a `lock` file on which every later build waits: nothing may be built at start-up."""
    build = tmp_path / "deepspeed_shm_comm"
    build.mkdir()
    (build / "lock").touch()
    code = (
        "from hybrid.environment import init_distributed\n"
        "device = init_distributed()\n"
        "import torch.distributed as dist\n"
        "dist.barrier()\n"
        "print(device, dist.get_world_size(), dist.get_backend())\n"
    )
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "cpu 1 gloo"
    assert time.monotonic() - start < 60
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["deepspeed_shm_comm", "lock"]
