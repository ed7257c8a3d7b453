"""Stressor `poison`, and the pool that tells stressors what it hands out and takes back.

What a pool hands out is undefined, and what it takes back is nobody's. A program that reads either
passes as long as the old contents happen to lie there. Poison fills the bytes with 0xFF, which is
NaN in every floating-point type that is trained in (bf16, fp16, fp32, fp8 of both kinds):

    acquire   [wait for the last user][fill]   then the caller writes
    release   what was issued so far [fill]    then the next user may have it

Both fills are work of the caller's stream, so they come before its first use and after its last, in
eager runs and inside a capture alike. Cost: one write of the buffer each, no synchronisation.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from fsdp_core.device import Device
from fsdp_core.fsdp.pool import Key, Pool
from fsdp_core.stress.races import Label, Races

POISON_BYTE = 0xFF


class PoolWatcher(Protocol):
    """Is told of the buffers of a pool."""

    def acquired(self, key: Key, buffer: torch.Tensor, stream: Any) -> None:
        """The key has `buffer` from now on; `stream` may write it."""

    def released(self, key: Key, buffer: torch.Tensor, stream: Any) -> None:
        """The key gives `buffer` back after the work of `stream`; it has not been given yet."""


class Poison:
    """Fills buffers as they are handed out and taken back, while `is_on`."""

    def __init__(self, device: Device) -> None:
        self.is_on = True
        self._device = device

    def acquired(self, key: Key, buffer: torch.Tensor, stream: Any) -> None:
        """See `PoolWatcher`."""
        del key
        self._fill(buffer, stream)

    released = acquired

    def _fill(self, buffer: torch.Tensor, stream: Any) -> None:
        if self.is_on:
            with self._device.on(stream), torch.no_grad():
                fill(buffer)


def fill(buffer: torch.Tensor) -> None:
    """Fill a contiguous buffer with NaN, whatever its type."""
    buffer.view(torch.uint8).fill_(POISON_BYTE)


class Labels:
    """Tells the race detector what a buffer is held for."""

    def __init__(self, races: Races) -> None:
        self._races = races

    def acquired(self, key: Key, buffer: torch.Tensor, stream: Any) -> None:
        """See `PoolWatcher`."""
        del stream
        self._races.label(buffer, Label(key.owner, key.role))

    def released(self, key: Key, buffer: torch.Tensor, stream: Any) -> None:
        """See `PoolWatcher`. The label stays until the next."""


class WatchedPool:
    """A pool that tells watchers what it does; each method is `inner`'s (see `pool.Pool`)."""

    def __init__(self, inner: Pool, watchers: Sequence[PoolWatcher]) -> None:
        self.inner = inner
        self._watchers = tuple(watchers)
        self._held: dict[Key, torch.Tensor] = {}

    def acquire(self, key: Key, numel: int, dtype: torch.dtype, stream: Any) -> torch.Tensor:
        """Hand a buffer out; watchers are told unless the key has it already."""
        buffer = self.inner.acquire(key, numel, dtype, stream)
        if key not in self._held:
            self._held[key] = buffer
            for watcher in self._watchers:
                watcher.acquired(key, buffer, stream)
        return buffer

    def release(self, key: Key, stream: Any) -> None:
        """Take a buffer back, after telling watchers."""
        buffer = self._held.pop(key, None)
        if buffer is not None:
            for watcher in self._watchers:
                watcher.released(key, buffer, stream)
        self.inner.release(key, stream)

    def can_acquire(self, key: Key) -> bool:
        """Whether the key could have a buffer now."""
        return self.inner.can_acquire(key)

    def end_of_pass(self) -> None:
        """A pass is over."""
        self.inner.end_of_pass()

    def freeze(self) -> None:
        """Addresses stay from now on."""
        self.inner.freeze()

    def forget_events(self) -> None:
        """Drop recorded events."""
        self.inner.forget_events()

    def reserved_bytes(self) -> int:
        """Bytes that the pool holds."""
        return self.inner.reserved_bytes()
