"""Puts back what running a step's code for practice has changed.

Warming up runs the real function: routers count tokens, scales of fp8 move, generators are drawn
from. A run that then goes on from there differs from one that never warmed up.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fsdp_core.device import Device
from fsdp_core.graph.recorder import OverCompiled


class _Writes(OverCompiled):
    """Sees operators, unless paused."""

    is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the operator, unless paused."""
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class Undo:
    """What persistent tensors and generators held when it was made, or when they were written.

    Args:
        generators: beside the device's default ones.
        state: tensors that may be changed by means that torch does not see: kernels of libraries
            and of the compiler.
    """

    def __init__(
        self,
        device: Device,
        generators: Sequence[torch.Generator],
        state: Sequence[torch.Tensor] = (),
    ) -> None:
        self._device = device
        self._rng_states = device.rng_states()
        self._generators = [(generator, generator.get_state()) for generator in generators]
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # One for all that is watched: what was made in a forward is no trace of its backward's.
        self._recorder = _Writes(
            keep_operations=False, before_write=lambda number, tensor: self._save(tensor)
        )
        for tensor in state:
            self._save(tensor)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Save every tensor from before that an operator inside writes, before it does."""
        with self._device.watching_storages(self._recorder), self._recorder:
            yield

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Not watching inside: what gathers parameters writes where others will write next."""
        kept, self._recorder.is_paused = self._recorder.is_paused, True
        try:
            yield
        finally:
            self._recorder.is_paused = kept

    def _save(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._saved and storage.nbytes():
            live = _bytes_of(storage)
            self._saved[storage._cdata] = (live, live.clone())

    def __enter__(self) -> "Undo":
        return self

    def __exit__(self, *_: object) -> None:
        self.put_back()

    def put_back(self) -> None:
        """Give every saved tensor its old bytes, in place, and every generator its old state."""
        for live, saved in self._saved.values():
            # What was given back or grown meanwhile belongs to somebody else's bookkeeping.
            if live.untyped_storage().nbytes() == saved.numel():
                live.copy_(saved)
        self._device.set_rng_states(self._rng_states)
        for generator, state in self._generators:
            generator.set_state(state)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage as bytes, without a version that autograd counts."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))
