"""What one worker process of the test pool does: serve calls from its parent until the connection closes."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
}
"""Set before torch is imported: the pool is for CPU and gloo, also on a machine with GPUs."""

DUMP_SIGNAL = signal.SIGUSR2
"""Makes a worker write the stacks of its threads to its stack file (SIGUSR1 is left to the code under test)."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One function call on every rank of a world."""

    path: str
    module: str
    qualname: str
    payload: bytes
    """The pickled (args, kwargs)."""
    world_size: int
    store: str
    """A file that does not exist yet, where the ranks find each other."""
    port: int
    timeout: float


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception raised by a rank; `pickled` is None where it cannot travel."""

    pickled: bytes | None
    summary: str
    traceback: str


def load_module(name: str, path: str) -> ModuleType:
    """The module `name`, executed from `path` where importing the name does not find that file (as pytest does)."""
    loaded = sys.modules.get(name)
    if loaded is not None and _same_file(getattr(loaded, "__file__", None), path):
        return loaded
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and _same_file(spec.origin, path):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python source file")
    module = importlib.util.module_from_spec(spec)
    # Registered under the parent's name, so that classes of the test file pickle in both directions.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _same_file(one: str | None, other: str) -> bool:
    return one is not None and os.path.exists(one) and os.path.samefile(one, other)


def _find(call: Call) -> Callable[..., Any]:
    found: Any = load_module(call.module, call.path)
    for part in call.qualname.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _describe(error: BaseException) -> Failure:
    try:
        pickled: bytes | None = pickle.dumps(error)
        pickle.loads(pickled or b"")
    except Exception:
        pickled = None
    summary = "".join(traceback.format_exception_only(error)).strip()
    return Failure(pickled=pickled, summary=summary, traceback="".join(traceback.format_exception(error)))


def _invoke(call: Call, rank: int) -> tuple[str, bytes | Failure]:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(call.world_size),
        LOCAL_WORLD_SIZE=str(call.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(call.port),
    )
    random.seed(0)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{call.store}",
            rank=rank,
            world_size=call.world_size,
            timeout=timedelta(seconds=call.timeout),
        )
        function = _find(call)
        args, kwargs = pickle.loads(call.payload)
        return "result", pickle.dumps(function(*args, **kwargs))
    except BaseException as error:  # SystemExit and pytest's outcomes too: the parent decides what they mean
        return "failure", _describe(error)


def _forget_call(environment: dict[str, str], directory: str) -> None:
    """Bring the process back to where it was, whatever the function did to it."""
    import torch
    import torch.distributed as dist

    from hybrid.environment import forget_deepspeed_groups

    if dist.is_initialized():
        dist.destroy_process_group()
    forget_deepspeed_groups()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():  # asked first: the setter imports inductor, for seconds
        torch.use_deterministic_algorithms(False)
    gc.collect()
    gc.freeze()  # what a call has imported and cached stays, so that the next collection need not look at it


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "a worker is started by multiprocessing"
    wait([parent.sentinel])
    os._exit(1)


def serve(rank: int, connection: Connection, stack_file: str) -> None:
    """The worker's main function."""
    os.setsid()  # a Ctrl-C is for the parent alone; killing the session takes data-loading children along
    threading.Thread(target=_die_with_parent, daemon=True).start()
    stacks = open(stack_file, "w")
    faulthandler.register(DUMP_SIGNAL, file=stacks, all_threads=True)
    os.environ.update(ENVIRONMENT)
    from hybrid.environment import disable_shared_memory_op

    disable_shared_memory_op()
    environment, directory = dict(os.environ), os.getcwd()
    gc.freeze()  # the modules' objects need no scan after each call
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        connection.send(_invoke(call, rank))
        # No rank leaves the group before all have their result: a peer may still be receiving from this one.
        try:
            connection.recv()
        except EOFError:
            return
        _forget_call(environment, directory)
