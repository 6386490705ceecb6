"""Random streams of tensor-parallel regions, and recomputation of activations that keeps them right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

TENSOR_PARALLEL = "tensor-parallel"
"""Name of the stream that differs between tensor-parallel ranks."""


def _get_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class RNGTracker:
    """Named random streams beside the default one of a device, as Megatron-LM's tracker.

    Activations between tensor-parallel regions are alike on all ranks of the axis, so their dropout must be too: that
    is the default stream. Inside a region each rank holds other heads and needs another mask: that is a named stream.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._states: dict[str, Tensor] = {}

    @classmethod
    def for_rank(cls, seed: int, tp_rank: int, device: torch.device | str = "cpu") -> RNGTracker:
        """A tracker with the tensor-parallel stream of `tp_rank`; give each data-parallel rank another `seed`."""
        tracker = cls(device)
        # Megatron's offset, which keeps the streams apart from the default one seeded with the bare seed.
        tracker.add(TENSOR_PARALLEL, seed + 2718 + tp_rank)
        return tracker

    def add(self, name: str, seed: int) -> None:
        """Start the stream `name` at `seed`, leaving the default stream where it is."""
        assert name not in self._states, "a stream is seeded once"
        before = _get_state(self._device)
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
        self._states[name] = _get_state(self._device)
        _set_state(self._device, before)

    def state(self) -> dict[str, Tensor]:
        """Where every stream stands."""
        return {name: state.clone() for name, state in self._states.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Put every stream back to where `state` says."""
        self._states = {name: value.clone() for name, value in state.items()}

    @contextmanager
    def fork(self, name: str = TENSOR_PARALLEL) -> Iterator[None]:
        """Draw from the stream `name` inside the block, and from the default one again after it."""
        before = _get_state(self._device)
        _set_state(self._device, self._states[name])
        try:
            yield
        finally:
            self._states[name] = _get_state(self._device)
            _set_state(self._device, before)

    @contextmanager
    def replay(self, state: dict[str, Tensor]) -> Iterator[None]:
        """Run the block with the streams at `state`, then put them back."""
        before = self._states
        self.load_state(state)
        try:
            yield
        finally:
            self._states = before


def checkpoint(fn: Callable[..., Any], *args: Any, rng: RNGTracker | None = None) -> Any:
    """`fn(*args)` whose intermediate activations are dropped and recomputed in backward (Chen et al. 2016).

    With `rng`, the default stream and the tracker's are put back for the recomputation, so that it draws the same
    dropout masks. Without, `fn` draws no random numbers and the states are not even read, which spares a
    synchronisation with the device.
    """
    if rng is None:
        return torch_checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False)
    state = rng.state()

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), rng.replay(state)

    return torch_checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=True, context_fn=contexts)


class DiscardedOutput:
    """Runs a cheap function whose output is not kept between the forward and the backward pass.

    The output of a norm or an activation is saved only because the linear layer after it needs its input for the
    weight gradient. Here its storage is emptied as soon as that consumer has run, and filled again, from the
    function's own inputs, when the gradient of the consumer's output arrives, that is just before it is needed. No
    GEMM and no collective is run twice: the selective form of recomputation (Korthikanti et al. 2022, section 5) for
    the parts that stay large once attention is computed blockwise.

    The function must be deterministic, return a new tensor, and keep its inputs rather than its output for its own
    backward. One object serves one call:

        discarded = DiscardedOutput()
        consumed = linear(discarded.run(norm, hidden))
        discarded.discard_after(consumed)
    """

    def __init__(self) -> None:
        self._call: tuple[Callable[..., Tensor], tuple[Any, ...]] | None = None
        self._output: Tensor | None = None

    def run(self, fn: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """`fn(*inputs)`, remembered."""
        self._call = fn, inputs
        self._output = fn(*inputs)
        return self._output

    def discard_after(self, consumer_output: Tensor) -> None:
        """Empty the output, now that the only operation that saved it has returned `consumer_output`."""
        if not consumer_output.requires_grad:
            # Nothing was saved and nothing will ask for it: the output dies by itself.
            self._call = self._output = None
            return
        assert self._output is not None, "run() comes before discard_after()"
        self._output.untyped_storage().resize_(0)
        consumer_output.register_hook(self._refill)

    def _refill(self, _grad: Tensor) -> None:
        if self._call is None or self._output is None:
            return  # a second backward through a retained graph: it is there already
        fn, inputs = self._call
        with torch.no_grad():
            fresh = fn(*inputs)
        # On the storage, below autograd: the saved tensor sees the values and no change of version.
        storage = self._output.untyped_storage()
        storage.resize_(fresh.untyped_storage().nbytes())
        storage.copy_(fresh.untyped_storage())
        # The graph may outlive its backward, for instance in a logged loss; it must not keep these alive.
        self._call = self._output = None
