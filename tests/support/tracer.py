"""Exact counts of what a piece of code does: collectives, FLOPs between their issue and wait, live bytes, operators."""

# mypy: allow-untyped-calls

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hybrid.collectives import exchange_meaning

_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
_NOT_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")


@dataclass(eq=False)
class Collective:
    """One collective, send or receive of this rank."""

    op: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`, `send`, `recv`, `barrier`, ...; an all-to-all that
    stands for one of them has its name."""
    payload: int
    """Bytes of the whole tensor: the input of a reduction, the output of a gather."""
    group_size: int
    group_name: str
    dtype: torch.dtype | None
    issued_at: int
    """FLOPs done when it was issued."""
    waited_at: int | None = None
    """FLOPs done when it was first waited for; None while nobody has."""

    @property
    def hidden_flops(self) -> int:
        """FLOPs between issue and wait: what the transfer can hide behind."""
        assert self.waited_at is not None, f"{self.op} of {self.payload} bytes was never waited for"
        return self.waited_at - self.issued_at


@dataclass(frozen=True)
class Mark:
    """A place in the program, set by `Tracer.mark`."""

    name: str
    flops: int


@dataclass
class _Patch:
    owner: type
    original: Callable[..., Any] = field(repr=False)


class Tracer(TorchDispatchMode):
    """Records while it is entered, backward passes included: autograd on a CPU runs in the calling thread.

    A storage counts as live from the operator that returned it until it is freed; one that comes in from outside (a
    parameter) does not count, unless it is among `counted`. A collective that C++ issues by itself shows no wait.
    """

    def __init__(self, counted: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.events: list[Collective | Mark] = []
        self.flops = 0
        self.operators = 0
        """ATen operators."""
        self.peak_bytes = 0
        self.largest_bytes = 0
        """Of the largest tensor's storage that an operator returned."""
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._outside: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._works: dict[int, tuple[Any, Collective]] = {}
        self._results: dict[int, Collective] = {}
        self._patches: list[_Patch] = []
        self._watch(counted, self._storages)

    @property
    def collectives(self) -> list[Collective]:
        """The collectives in the order of their issue."""
        return [event for event in self.events if isinstance(event, Collective)]

    @property
    def names(self) -> list[str]:
        """Collectives and marks by name, in order."""
        return [event.op if isinstance(event, Collective) else event.name for event in self.events]

    def payload(self, op: str) -> int:
        """Bytes of all collectives of one kind."""
        return sum(event.payload for event in self.collectives if event.op == op)

    @property
    def live_bytes(self) -> int:
        """Bytes of the counted storages that are alive now, at their present sizes."""
        storages = [reference() for reference in list(self._storages.values())]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def settled_bytes(self) -> int:
        """`live_bytes` once gloo's thread has let go of what finished collectives moved, a moment after their wait."""
        before, now = -1, self.live_bytes
        while now != before:
            time.sleep(0.03)
            before, now = now, self.live_bytes
        return now

    def mark(self, name: str) -> None:
        """Put a mark between the collectives."""
        self.events.append(Mark(name, self.flops))

    def __enter__(self) -> Any:
        if not self._patches:
            # Waiting is a method call in C++, not an operator: the only thing the dispatcher does not show.
            for owner in (dist.Work, getattr(torch._C._distributed_c10d, "FakeWork", dist.Work)):
                if "wait" in vars(owner) and all(patch.owner is not owner for patch in self._patches):
                    self._patch_wait(owner)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for patch in self._patches:
            patch.owner.wait = patch.original  # type: ignore[attr-defined]
        self._patches.clear()
        self._works.clear()

    def _patch_wait(self, owner: Any) -> None:
        original = owner.wait

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            _, collective = self._works.pop(id(work), (None, None))
            if collective is not None:
                self._waited(collective)
            return original(work, *args, **kwargs)

        owner.wait = wait
        self._patches.append(_Patch(owner, original))

    def _waited(self, collective: Collective) -> None:
        if collective.waited_at is None:
            collective.waited_at = self.flops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            return self._communicate(func, args, kwargs)
        packet = func._overloadpacket
        if packet not in _FLOPS and torch.is_inference_mode_enabled():
            with self:  # only there do composite operators arrive whole
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        leaves = tree_leaves((args, kwargs))
        self._watch(leaves, self._outside)
        for leaf in leaves:
            if isinstance(leaf, functional.AsyncCollectiveTensor):
                self._wait_for(leaf.elem)
        result = func(*args, **kwargs)
        self.operators += 1
        if packet in _FLOPS:
            self.flops += _FLOPS[packet](*args, **kwargs, out_val=result)
        results = tree_leaves(result)
        self._watch(results, self._storages)
        self.largest_bytes = max(self.largest_bytes, *(s.nbytes() for s in _storages_of(results)), 0)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name.split("::")[1]
        result = func(*args, **kwargs)
        if name == "wait_tensor":
            self._wait_for(args[0])
        if name in _NOT_COLLECTIVES:
            return result
        op = _NAMES.get(name, _NAMES.get(name.rstrip("_"), name.rstrip("_")))
        if name == "alltoall_base_":
            op = exchange_meaning(args[0]) or op
        parts = [[leaf for leaf in tree_leaves(part) if isinstance(leaf, torch.Tensor)] for part in (*args, result)]
        largest = max(parts, key=lambda tensors: sum(tensor.nbytes for tensor in tensors))
        empty = op == "barrier" or not largest
        group = _group_of(args)
        collective = Collective(
            op=op,
            payload=0 if empty else sum(tensor.nbytes for tensor in largest),
            group_size=group.size(),
            group_name=group.group_name,
            dtype=None if empty else largest[0].dtype,
            issued_at=self.flops,
        )
        self.events.append(collective)
        if func.namespace == "c10d":
            boxed = result[-1] if isinstance(result, tuple) else result
            # The very object the caller will wait for; it is kept, as its id names it, until then.
            work = dist.Work.unbox(boxed)
            self._works[id(work)] = work, collective
        else:
            outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self._watch(outputs, self._storages)
            self._results |= {output.untyped_storage()._cdata: collective for output in outputs}
        return result

    def _wait_for(self, tensor: torch.Tensor) -> None:
        collective = self._results.pop(tensor.untyped_storage()._cdata, None)
        if collective is not None:
            self._waited(collective)

    def _watch(self, leaves: Iterable[Any], known: dict[int, weakref.ref[torch.UntypedStorage]]) -> None:
        for storage in _storages_of(leaves):
            key = storage._cdata
            if key not in self._storages and key not in self._outside:
                known[key] = weakref.ref(storage, partial(_forget, known, key))


def _storages_of(leaves: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    for leaf in leaves:
        if isinstance(leaf, functional.AsyncCollectiveTensor):
            leaf = leaf.elem
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            yield leaf.untyped_storage()


def _forget(known: dict[int, Any], key: int, reference: object) -> None:
    known.pop(key, None)


_RESOLVE: Any = vars(dist.distributed_c10d)["_resolve_process_group"]


def _group_of(args: Any) -> Any:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            return dist.ProcessGroup.unbox(arg)
    names = [arg for arg in args if isinstance(arg, str)]
    return _RESOLVE(names[-1])


def _cpu_attention(query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> Any:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _cpu_attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


_ATEN: Any = torch.ops.aten
_FLOPS: dict[Any, Any] = {
    **flop_registry,
    # torch's own counter does not know this.
    _ATEN.addmm_: flop_registry[_ATEN.addmm],
    # Nor its CPU kernels; like it, they count the whole square of a causal mask.
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
}
