"""The process environment: what a launcher left there, threads, and the start of torch.distributed."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long a collective may take before the run is given up."""

DEFAULT_MASTER_PORT = 29500

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Hardware queues that a GPU takes kernels from."""

_BLACKWELL = 10
"""First compute capability on which Megatron-LM does not ask for a single queue any more."""

_SHOW_CAPABILITY = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")


class LaunchError(ValueError):
    """The environment does not describe a consistent set of processes."""


def gpu_is_present(device_folder: Path = Path("/dev"), environ: Mapping[str, str] = os.environ) -> bool:
    """True if this process can see an NVIDIA or AMD GPU, found without importing torch."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return False
    if any(re.fullmatch(r"nvidia\d+", path.name) for path in device_folder.glob("nvidia*")):
        return True
    return (device_folder / "kfd").exists() and any(device_folder.glob("dri/renderD*"))


def compute_capability(command: Sequence[str] = _SHOW_CAPABILITY) -> int | None:
    """Major compute capability of this host's first NVIDIA GPU, found without starting CUDA; None where not known."""
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.match(r"\s*(\d+)\.\d", listed)
    return int(found.group(1)) if found else None


def connections_in_words(environ: Mapping[str, str] = os.environ) -> str:
    """Whether kernels start in the order of their launch, for the log of a tensor-parallel run."""
    value = environ.get(CONNECTIONS)
    if value == "1":
        return f"{CONNECTIONS} is 1: tensor-parallel collectives start before the GEMMs that hide them"
    return f"{CONNECTIONS} is {value or 'not set'}; before Blackwell, 1 keeps tensor-parallel collectives hidden"


def prepare_process(environ: MutableMapping[str, str] = os.environ, *, tensor_parallel: bool = False) -> None:
    """Set what must be set before torch is imported; call it first.

    Unless the user chose a number: OMP_NUM_THREADS on a machine without GPU (the cores shared out among its ranks), and
    for a tensor-parallel run on GPUs before Blackwell CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron-LM demands: with one
    queue a collective that was launched before a GEMM also starts before it, so that it is hidden behind it.

    Raises:
        LaunchError: the launch variables are inconsistent.
    """
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "OMP_NUM_THREADS" not in environ and not gpu_is_present(environ=environ):
        launch = dict(environ)
        normalise_launch_variables(launch)
        ranks = _integer(launch, "LOCAL_WORLD_SIZE", _integer(launch, "WORLD_SIZE", 1))
        environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    if tensor_parallel and CONNECTIONS not in environ and gpu_is_present(environ=environ):
        if (compute_capability() or 0) < _BLACKWELL:
            environ[CONNECTIONS] = "1"


def disable_shared_memory_op() -> None:
    """Keep DeepSpeed from compiling its CPU shared-memory op when the process group is made.

    The build waits on a file lock that a killed build leaves behind, for ever. DeepSpeed asks this table, which it
    fills by running compilers on first access, before it builds; nothing else reads it.
    """
    import deepspeed.ops

    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


def forget_deepspeed_groups() -> None:
    """Drop what DeepSpeed remembers about process groups that have been destroyed."""
    if "deepspeed" not in sys.modules:
        return
    import deepspeed.comm.comm as comm
    from deepspeed.runtime.activation_checkpointing import checkpointing
    from deepspeed.utils import groups

    comm.cdb = None
    groups._release_process_group_references()
    checkpointing.mpu, checkpointing.mp_group = None, None


def first_host(node_list: str) -> str:
    """The first host of a Slurm node list.

    >>> first_host("node[01-03,07],other5"), first_host("a-1,b-2"), first_host("r[2,4]c[10-11]")
    ('node01', 'a-1', 'r2c10')
    """
    first = re.match(r"((?:[^,\[\]]|\[\w[^\[\]]*\])+)(?:,|$)", node_list.strip())
    if first is None:
        raise LaunchError(f"SLURM_JOB_NODELIST={node_list!r} is not a node list; set MASTER_ADDR to rank 0's host")
    return re.sub(r"\[(\w+)[^\[\]]*\]", r"\1", first.group(1))


def started_by_srun(environ: Mapping[str, str] = os.environ) -> bool:
    """True for one of several tasks of a Slurm step, and not for the shell of a batch script.

    The shell has most of a task's variables; it lacks the step's, and sbatch marks it with ENVIRONMENT=BATCH.
    """
    is_task = "SLURM_PROCID" in environ and _integer(environ, "SLURM_NTASKS", 1) > 1
    return is_task and ("SLURM_STEP_ID" in environ or environ.get("ENVIRONMENT") != "BATCH")


def normalise_launch_variables(environ: MutableMapping[str, str] = os.environ) -> None:
    """Give a process torchrun's variables, whichever launcher started it.

    torchrun and `accelerate launch` set all six; DeepSpeed's launcher leaves LOCAL_WORLD_SIZE out; srun and Open MPI
    have names of their own; with none of them this is a world of one.

    Raises:
        LaunchError: a variable is not a number, or rank and size contradict each other.
    """
    if "RANK" not in environ:
        if started_by_srun(environ):
            _from_slurm(environ)
        elif "OMPI_COMM_WORLD_RANK" in environ:
            _from_open_mpi(environ)
    world_size = _integer(environ, "WORLD_SIZE", 1)
    if "RANK" not in environ and world_size > 1:
        raise LaunchError(
            f"WORLD_SIZE is {world_size} but RANK is not set; start the ranks with deepspeed, torchrun, "
            "accelerate launch, srun or mpirun, or unset WORLD_SIZE"
        )
    rank = _integer(environ, "RANK", 0)
    if not 0 <= rank < world_size:
        raise LaunchError(f"RANK={rank} is outside the world of WORLD_SIZE={world_size} processes")
    if world_size > 1 and "LOCAL_RANK" not in environ:
        raise LaunchError("LOCAL_RANK is not set: give each process its index on its host")
    local_rank = _integer(environ, "LOCAL_RANK", 0)
    if world_size > 1 and "MASTER_ADDR" not in environ:
        raise LaunchError("MASTER_ADDR is not set: give every process the name of rank 0's host")
    if "LOCAL_SIZE" in environ:  # DeepSpeed's launcher
        environ.setdefault("LOCAL_WORLD_SIZE", environ["LOCAL_SIZE"])
    defaults = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port() if world_size == 1 else DEFAULT_MASTER_PORT,
    }
    for name, value in defaults.items():
        environ.setdefault(name, str(value))


def _from_slurm(environ: MutableMapping[str, str]) -> None:
    environ["RANK"] = environ["SLURM_PROCID"]
    environ["WORLD_SIZE"] = environ["SLURM_NTASKS"]
    if "SLURM_LOCALID" in environ:
        environ["LOCAL_RANK"] = environ["SLURM_LOCALID"]
    tasks = re.match(r"\d+", environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", ""))
    if tasks:
        environ.setdefault("LOCAL_WORLD_SIZE", tasks.group())
    if "MASTER_ADDR" not in environ:
        nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
        environ["MASTER_ADDR"] = first_host(nodes)
    if "MASTER_PORT" not in environ:
        # Every rank computes the same one, and two jobs on a node rarely meet; below the ephemeral range.
        environ["MASTER_PORT"] = str(15000 + _integer(environ, "SLURM_JOB_ID", 0) % 15000)


def _from_open_mpi(environ: MutableMapping[str, str]) -> None:
    names = {"RANK": "RANK", "WORLD_SIZE": "SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_WORLD_SIZE": "LOCAL_SIZE"}
    for name, suffix in names.items():
        value = environ.get(f"OMPI_COMM_WORLD_{suffix}")
        if value is not None:
            environ[name] = value
    world_size = _integer(environ, "WORLD_SIZE", 1)
    if world_size > 1 and environ.get("LOCAL_WORLD_SIZE") == environ["WORLD_SIZE"]:
        environ.setdefault("MASTER_ADDR", "127.0.0.1")


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    value = environ.get(name, "").strip()
    if not value:
        return default
    if not re.fullmatch(r"-?\d+", value):
        raise LaunchError(f"{name}={value!r} is not a whole number; the launcher sets it, remove it or correct it")
    return int(value)


def free_port() -> int:
    """A TCP port of this machine that nothing listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def init_distributed(timeout: timedelta = DEFAULT_TIMEOUT) -> torch.device:
    """Start torch.distributed through DeepSpeed (NCCL on GPUs, gloo elsewhere); the device of this rank.

    Raises:
        LaunchError: the environment is inconsistent, or the host has fewer GPUs than ranks.
    """
    normalise_launch_variables()
    import deepspeed.comm
    import torch

    disable_shared_memory_op()
    if torch.cuda.is_available():
        local_rank, devices = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        # srun --gpus-per-task shows each task one GPU of its own.
        index = 0 if devices == 1 and local_rank > 0 and "SLURM_PROCID" in os.environ else local_rank
        if index >= devices:
            raise LaunchError(
                f"LOCAL_RANK={local_rank}, but this host shows {devices} GPUs; start at most {devices} ranks on it "
                "or widen CUDA_VISIBLE_DEVICES"
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    deepspeed.comm.init_distributed(backend, timeout=timeout, auto_mpi_discovery=False, verbose=False)
    return device


def set_up_logging(rank: int) -> None:
    """The run's own lines on rank 0, warnings on all; DeepSpeed tells every rank's internals at INFO."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hybrid").setLevel(logging.INFO if rank == 0 else logging.WARNING)
    # What the data are is the same on every rank.
    logging.getLogger("hybrid.data").setLevel(logging.NOTSET if rank == 0 else logging.ERROR)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
