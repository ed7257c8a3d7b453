"""Races found on the CPU: streams that only keep clocks, and a mode that watches every operator.

On the CPU work runs as it is issued, so a missing wait does no harm and shows in no result. Here
each stream has a vector clock: how far into every stream's work it has waited. `Races` notes for
every range of memory who touched it when, and reports an access that a CUDA device could reorder
with an earlier one, at least one of the two being a write. Memory that dies is checked against the
stream that allocated it, because the caching allocator hands it to that stream's next work.
"""

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_iter

from fsdp_core.device import Device
from fsdp_core.fsdp import api

Clock = dict[str, int]


@dataclass(frozen=True)
class ClockEvent:
    """A point in a stream's work."""

    clock: Clock

    def synchronize(self) -> None:
        """The host waits for nothing here."""


class ClockStream:
    """A stream that knows how far into each stream's work it has waited."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {name: 0}

    def wait_event(self, event: ClockEvent) -> None:
        """Order what follows after the event."""
        for name, time in event.clock.items():
            self.clock[name] = max(self.clock.get(name, 0), time)

    def wait_stream(self, stream: "ClockStream") -> None:
        """Order what follows after the other stream's work so far."""
        self.wait_event(stream.record_event())

    def record_event(self) -> ClockEvent:
        """Mark this point."""
        return ClockEvent(dict(self.clock))

    def comes_after(self, name: str, time: int) -> bool:
        """Whether work issued now runs after that of stream `name` at `time`."""
        return self.clock.get(name, 0) >= time


@dataclass(frozen=True)
class _Access:
    start: int
    stop: int
    stream: str
    time: int
    writes: bool
    what: str


@dataclass
class _Memory:
    home: ClockStream
    reference: Any
    accesses: list[_Access] = field(default_factory=list)


@dataclass(frozen=True)
class Collective:
    """One collective: `gather`, `scatter` or `all_reduce`, elements of the larger side, stream."""

    kind: str
    numel: int
    stream: str
    aliased: bool
    """Whether a reduce-scatter's output lies in its input."""


_COLLECTIVES = {
    "c10d::_allgather_base_": "gather",
    "c10d::_reduce_scatter_base_": "scatter",
    "c10d::allreduce_": "all_reduce",
}
_ALLOCATORS = {
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
}


class Races(TorchDispatchMode):
    """Watches operators; `found` lists races, `log` what was communicated, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.current = ClockStream("current")
        self.streams = [self.current]
        self.active = [self.current]
        self.found: list[str] = []
        self.log: list[Collective | str] = []
        """Collectives, and what a program writes between them."""
        self._memory: dict[int, _Memory] = {}

    @property
    def collectives(self) -> list[Collective]:
        """What was communicated, in order."""
        return [entry for entry in self.log if isinstance(entry, Collective)]

    def device(self, kind: str, index: int = 0) -> Device:
        """Stands for `Device`: the CPU with streams of this clockwork."""
        return _ClockDevice(kind, index, self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then note what it read and wrote."""
        if types and any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in _ALLOCATORS:
            # No kernel runs, but work that had this memory before may: whoever uses it must come
            # after what its stream has been given so far.
            self._touch_all(out, "the allocator", writes=True)
            return out
        stream = self.active[-1]
        stream.clock[stream.name] += 1
        if name in _COLLECTIVES:
            self._collective(name, args)
            return out
        aliases = [r.alias_info for r in func._schema.returns]
        if aliases and all(a is not None and not a.is_write for a in aliases):
            return out  # a view: nothing is touched
        for argument, value in zip(func._schema.arguments, args, strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            self._touch_all(value, name, writes=writes)
        for key, value in (kwargs or {}).items():
            self._touch_all(value, name, writes=key == "out")
        if all(a is None for a in aliases):
            self._touch_all(out, name, writes=True)
        return out

    def _collective(self, name: str, args: Any) -> None:
        kind = _COLLECTIVES[name]
        written = [t for t in tree_iter(args[0]) if isinstance(t, torch.Tensor)]
        read = [args[1]] if kind != "all_reduce" else []
        for tensor in read:
            self._touch(tensor, kind, writes=False)
        for tensor in written:
            self._touch(tensor, kind, writes=True)
        numel = max(t.numel() for t in (*written, *read))
        places = [t.untyped_storage()._cdata for t in (*written, *read)]
        aliased = kind == "scatter" and places[0] == places[-1]
        self.log.append(Collective(kind, numel, self.active[-1].name, aliased))

    def _touch_all(self, value: Any, what: str, *, writes: bool) -> None:
        for tensor in tree_iter(value):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self._touch(tensor, what, writes=writes)

    def _touch(self, tensor: torch.Tensor, what: str, *, writes: bool) -> None:
        if tensor.numel() == 0 or is_traceable_wrapper_subclass_type(type(tensor)):
            return
        stream, memory = self.active[-1], self._memory_of(tensor.untyped_storage())
        start = int(tensor.storage_offset()) * tensor.element_size()
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        stop = start + (reach + 1) * tensor.element_size()
        for old in memory.accesses:
            if old.start < stop and start < old.stop and (old.writes or writes):
                self._order(old, stream, f"{what} {'writes' if writes else 'reads'}")
        memory.accesses = [
            a
            for a in memory.accesses
            if not (
                a.stream == stream.name and (a.start, a.stop, a.writes) == (start, stop, writes)
            )
        ]
        time = stream.clock[stream.name]
        memory.accesses.append(_Access(start, stop, stream.name, time, writes, what))

    def _order(self, old: _Access, stream: ClockStream, now: str) -> None:
        if not stream.comes_after(old.stream, old.time):
            kind = "written" if old.writes else "read"
            line = f"{now} on {stream.name} what {old.what} has {kind} on {old.stream}, no wait"
            if line not in self.found:
                self.found.append(line)

    def _memory_of(self, storage: torch.UntypedStorage) -> _Memory:
        key = storage._cdata
        memory = self._memory.get(key)
        if memory is None or memory.reference() is None:
            reference = weakref.ref(storage, lambda _: self._die(key, _))
            memory = self._memory[key] = _Memory(self.active[-1], reference)
        return memory

    def _die(self, key: int, reference: Any) -> None:
        memory = self._memory.get(key)
        if memory is not None and memory.reference is reference:
            del self._memory[key]
            self._free(memory)

    def _free(self, memory: _Memory) -> None:
        for old in memory.accesses:
            self._order(old, memory.home, "the allocator reuses")
        memory.accesses = []

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage was emptied or filled in place: memory died or was allocated."""
        memory = self._memory_of(storage)
        if storage.nbytes() == 0:
            self._free(memory)
        memory.home = self.active[-1] if storage.nbytes() else memory.home


class _ClockDevice(Device):
    """The CPU, with streams that keep clocks."""

    def __init__(self, kind: str, index: int, races: Races) -> None:
        super().__init__(kind, index)
        self._races = races

    def new_stream(self) -> Any:
        stream = ClockStream(f"side {len(self._races.streams)}")
        self._races.streams.append(stream)
        return stream

    def current_stream(self) -> Any:
        return self._races.active[-1]

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return self._on(stream)

    @contextlib.contextmanager
    def _on(self, stream: ClockStream) -> Iterator[None]:
        self._races.active.append(stream)
        try:
            yield
        finally:
            self._races.active.pop()


@contextlib.contextmanager
def watching() -> Iterator[Races]:
    """Units wrapped inside get streams with clocks, and every operator is watched."""
    races = Races()
    with patch.object(api, "Device", races.device), Device("cpu").watching_storages(races), races:
        yield races
