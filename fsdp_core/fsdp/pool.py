"""Where full-size buffers come from: one interface, two allocators.

    dynamic   one buffer a key, its storage freed on release and allocated again on acquire
    double    two fixed buffers a (role, dtype, size) class; a key keeps the buffer it got first

A key is (unit, role). The tensor returned for a key has the same storage object each time, so views
that autograd saved stay valid; with `double` it also has the same address, as partial graphs need.
A key of `double` whose buffer is taken gets a persistent one of its own (`persistent_on_miss`), or
a dynamic one.

Ordering: `release` records an event on the releasing stream, and the next `acquire` of that memory
waits for it on the acquiring stream. No memory is handed on by `record_stream`.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from fsdp_core.device import Device


class Key(NamedTuple):
    """Identity of a buffer: whose it is and what it is for (gather or grad)."""

    owner: int
    role: str


class Pool(Protocol):
    """Hands out full-size buffers."""

    def acquire(self, key: Key, numel: int, dtype: torch.dtype, stream: Any) -> torch.Tensor:
        """A 1-d buffer for `key`, safe to write on `stream`. It keeps its identity per key."""

    def release(self, key: Key, stream: Any) -> None:
        """Give the buffer back once the work issued on `stream` so far is done."""

    def freeze(self) -> None:
        """From now on no key may change its buffer: graphs hold the addresses."""

    def forget_events(self) -> None:
        """Drop recorded events; legal only when the device is idle or a capture begins or ends."""


@dataclass
class _Buffer:
    tensor: torch.Tensor
    owner: Key | None = None
    event: Any = None
    home_stream: Any = None
    keys: set[Key] = field(default_factory=set)


class DynamicPool:
    """Frees storage on release, so that memory holds only what is gathered now."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: dict[Key, _Buffer] = {}

    def acquire(self, key: Key, numel: int, dtype: torch.dtype, stream: Any) -> torch.Tensor:
        """See `Pool`."""
        buffer = self._buffers.get(key)
        with self._device.on(stream):
            if buffer is None:
                tensor = torch.empty(numel, dtype=dtype, device=self._device.torch_device)
                buffer = self._buffers[key] = _Buffer(tensor)
            else:
                if buffer.event is not None:
                    stream.wait_event(buffer.event)
                storage = buffer.tensor.untyped_storage()
                self._device.resize_storage(storage, numel * buffer.tensor.element_size())
        buffer.owner, buffer.home_stream = key, stream
        return buffer.tensor

    def release(self, key: Key, stream: Any) -> None:
        """See `Pool`."""
        buffer = self._buffers[key]
        buffer.owner, buffer.event = None, stream.record_event()
        # The caching allocator gives the block to later work of the stream that allocated it,
        # whichever key asks, so that stream must come after the last use.
        buffer.home_stream.wait_event(buffer.event)
        self._device.resize_storage(buffer.tensor.untyped_storage(), 0)

    def freeze(self) -> None:
        """Nothing to do: only full_iteration graphs may use this pool, and they hold no address."""

    def forget_events(self) -> None:
        """See `Pool`."""
        for buffer in self._buffers.values():
            buffer.event = None


class DoublePool:
    """Two fixed buffers a class; sticky keys; a miss gets a buffer of its own."""

    def __init__(self, device: Device, *, persistent_on_miss: bool) -> None:
        self._device = device
        self._persistent_on_miss = persistent_on_miss
        self._classes: dict[tuple[str, torch.dtype, int], list[_Buffer]] = {}
        self._homes: dict[Key, _Buffer] = {}
        self._overflow = DynamicPool(device)
        self._overflowing: set[Key] = set()
        self._frozen = False

    def acquire(self, key: Key, numel: int, dtype: torch.dtype, stream: Any) -> torch.Tensor:
        """See `Pool`.

        Raises:
            RuntimeError: the key's buffer is taken after `freeze`.
        """
        buffer = self._homes.get(key) or self._first_home(key, numel, dtype)
        if buffer is None or (buffer.owner not in (None, key)):
            if self._frozen:
                taken = buffer.owner if buffer else "every buffer of its class"
                raise RuntimeError(
                    f"Expected the captured buffer of {key} to be free, but {taken} holds it; "
                    "a graph would read foreign data."
                )
            if not self._persistent_on_miss:
                self._overflowing.add(key)
                return self._overflow.acquire(key, numel, dtype, stream)
            buffer = self._homes[key] = self._new_buffer(numel, dtype)
        if buffer.event is not None:
            stream.wait_event(buffer.event)
        buffer.owner = key
        return buffer.tensor

    def release(self, key: Key, stream: Any) -> None:
        """See `Pool`."""
        if key in self._overflowing:
            self._overflowing.discard(key)
            self._overflow.release(key, stream)
            return
        buffer = self._homes[key]
        buffer.owner, buffer.event = None, stream.record_event()

    def freeze(self) -> None:
        """See `Pool`."""
        self._frozen = True

    def forget_events(self) -> None:
        """See `Pool`."""
        for buffer in self._homes.values():
            buffer.event = None
        self._overflow.forget_events()

    def _first_home(self, key: Key, numel: int, dtype: torch.dtype) -> _Buffer | None:
        """Choose a buffer of the key's class that no other key holds now; None on a miss."""
        size_class = self._classes.setdefault((key.role, dtype, numel), [])
        free = [buffer for buffer in size_class if buffer.owner is None]
        if len(size_class) < 2 and not self._frozen:
            # Fill both before sharing, so that neighbours in the order alternate.
            free = [self._new_buffer(numel, dtype)]
            size_class.extend(free)
        if not free:
            return None
        buffer = min(free, key=lambda buffer: len(buffer.keys))
        buffer.keys.add(key)
        self._homes[key] = buffer
        return buffer

    def _new_buffer(self, numel: int, dtype: torch.dtype) -> _Buffer:
        return _Buffer(torch.empty(numel, dtype=dtype, device=self._device.torch_device))


def make_pool(name: str, device: Device, *, persistent_on_miss: bool) -> Pool:
    """The pool called `name`: `dynamic` or `double`."""
    if name == "dynamic":
        return DynamicPool(device)
    return DoublePool(device, persistent_on_miss=persistent_on_miss)
