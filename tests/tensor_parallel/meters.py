"""Exact counts on a CPU: bytes of live storage, and the order of collectives and GEMMs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybrid.collectives import exchange_meaning

_COLLECTIVES = {"allreduce": "all_reduce", "allgather": "all_gather", "reduce_scatter": "reduce_scatter"}
_GEMMS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.linear")


class LiveStorage(TorchDispatchMode):
    """Bytes of the storages that operators have returned inside the block and that are still alive.

    Autograd on a CPU runs in the calling thread, so the backward pass is seen too. Views count with the storage they
    look at, except that of the tensors `outside`.
    """

    def __init__(self, outside: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._outside = [tensor.untyped_storage() for tensor in outside]
        self.peak = 0

    @property
    def bytes(self) -> int:
        storages = [ref() for ref in self._live.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if id(storage) not in self._live and all(storage is not known for known in self._outside):
                    key = id(storage)
                    self._live[key] = weakref.ref(storage, lambda _, key=key: self._live.pop(key, None))
        self.peak = max(self.peak, self.bytes)
        return out


class Events(TorchDispatchMode):
    """Names of the collectives and GEMMs in the order they are launched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d."):
            meaning = exchange_meaning(args[0]) if "alltoall" in name else None
            self.names += [meaning] if meaning else [ours for theirs, ours in _COLLECTIVES.items() if theirs in name]
        elif name.startswith(_GEMMS):
            self.names.append("gemm")
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> int:
        return self.names.count(name)
