"""Stressor `races`: on the CPU, accesses to memory that a CUDA device could run in either order.

On the CPU work runs as it is issued, so a missing wait does no harm and shows in no result. Here
each stream counts what was issued on it and has a vector clock: how far into every stream's work it
has waited (Mattern, 1989). A dispatch mode sees every operator, and for every range of memory it is
known who touched it when. Two accesses race if they overlap, one of them writes, and no wait orders
them. Memory that dies, or is emptied in its place, is checked against the stream that it was made
on: the caching allocator gives it to that stream's next work. What the host waits for comes before
all that is issued later, anywhere.

What is captured into a host graph is checked twice: as it is recorded, on the streams of the
program, and at each replay, as work of the stream that replays.

Not seen: collectives that run beside the stream that issued them (`async_op=True`), which count as
work of that stream; kernels that are given addresses; reads of Python (`numpy()`).
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_iter

from fsdp_core.device import HostStreams, Lending, is_collective
from fsdp_core.dispatch import ALLOCATIONS, ObservingMode, calling_line, opens_itself
from fsdp_core.fsdp.pool import GRAD, Key

_SIZED_BY_DATA = frozenset({"aten::nonzero", "aten::masked_select", "aten::_unique2"})

# --- clocks -----------------------------------------------------------------------------------

Clock = dict[int, int]
"""How far into the work of each stream, by its number."""


def _join(clock: Clock, other: Clock) -> None:
    for number, time in other.items():
        if clock.get(number, 0) < time:
            clock[number] = time


class ClockEvent:
    """A point in a stream's work."""

    def __init__(self, clocks: "Clocks", clock: Clock) -> None:
        self._clocks, self.clock = clocks, clock

    def synchronize(self) -> None:
        self._clocks.host_waits(self.clock)


class ClockStream:
    """A stream that knows how far into each stream's work it has waited."""

    def __init__(self, clocks: "Clocks", number: int, name: str) -> None:
        self._clocks, self.number, self.name = clocks, number, name
        self.clock: Clock = {number: 0}

    @property
    def time(self) -> int:
        return self.clock[self.number]

    def issue(self) -> None:
        self.clock[self.number] += 1

    def wait_event(self, event: ClockEvent) -> None:
        _join(self.clock, event.clock)

    def wait_stream(self, stream: "ClockStream") -> None:
        """Order what follows after the other stream's work so far."""
        _join(self.clock, stream.clock)

    def record_event(self) -> ClockEvent:
        return ClockEvent(self._clocks, dict(self.clock))

    def synchronize(self) -> None:
        self._clocks.host_waits(self.clock)

    def comes_after(self, stream: "ClockStream", time: int) -> bool:
        """Whether work issued now runs after that of `stream` at `time`."""
        return self.clock.get(stream.number, 0) >= time


class Clocks(HostStreams):
    """All streams of a rank; stands for the CPU's in `Device.modelling_streams`."""

    def __init__(self) -> None:
        self.streams: list[ClockStream] = []
        self._host: Clock = {}
        self._active = [self.new_stream("default")]

    def new_stream(self, name: str) -> ClockStream:
        """A side stream; without a name it gets its number."""
        number = len(self.streams)
        stream = ClockStream(self, number, name or f"side {number}")
        _join(stream.clock, self._host)
        self.streams.append(stream)
        return stream

    def current_stream(self) -> ClockStream:
        return self._active[-1]

    @contextlib.contextmanager
    def on(self, stream: ClockStream) -> Iterator[None]:
        self._active.append(stream)
        try:
            yield
        finally:
            self._active.pop()

    def synchronize(self) -> None:
        for stream in self.streams:
            self.host_waits(stream.clock)

    def host_waits(self, clock: Clock) -> None:
        """Order all that is issued from now on, on any stream, after what a clock knows."""
        _join(self._host, clock)
        for stream in self.streams:
            _join(stream.clock, self._host)


# --- what is found ----------------------------------------------------------------------------


class Named(NamedTuple):
    """A tensor that people know, and the FSDP unit it belongs to, or ""."""

    name: str
    unit: str
    tensor: torch.Tensor
    is_gradient: bool = False


@dataclass(frozen=True, slots=True)
class Access:
    """One operator's use of bytes `start` up to `stop` of a storage.

    time: the stream's count when it was issued.
    operator: its name.
    place: `file:line` of the program.
    """

    start: int
    stop: int
    stream: ClockStream
    time: int
    writes: bool
    operator: str
    place: str

    def told(self) -> str:
        verb = "writes" if self.writes else "reads"
        return f"{self.operator} {verb} on stream {self.stream.name} at {self.place}"


@dataclass(frozen=True)
class Race:
    """Two accesses that nothing orders, at least one of which writes.

    tensor: whose memory, as far as it has a name.
    unit: FSDP unit that holds the tensor, or "".
    is_gradient: whether gradients are in it.
    """

    tensor: str
    unit: str
    earlier: Access
    later: Access
    is_gradient: bool = False

    @property
    def name(self) -> str:
        """The tensor with its unit, unless its name says that."""
        is_said = self.tensor.startswith(self.unit)
        return self.tensor if is_said else f"{self.tensor} of unit {self.unit}"

    def __str__(self) -> str:
        return f"{self.name}: {self.later.told()}, {self.earlier.told()}, unordered"


class RaceFound(RuntimeError):
    """Work of two streams touches the same memory, and no wait says which comes first. `races`: all
    that were found, in order.
    """

    def __init__(self, races: list[Race]) -> None:
        self.races = races
        more = f" (and {len(races) - 1} more)" if len(races) > 1 else ""
        super().__init__("\n".join([f"{races[0]}{more}", *map(str, races[1:8])]))


@dataclass
class _Memory:
    """One storage: `source` is the pool's buffer that what lies in it was made from, last."""

    home: ClockStream
    reference: Any
    made_by: str
    label: Key | None = None
    source: Key | None = None
    accesses: list[Access] = field(default_factory=list)


class _Kind(NamedTuple):
    """What an operator does with its arguments, by its schema; of `is_awaited` the host waits."""

    name: str
    writes: frozenset[str]
    arguments: tuple[str, ...]
    is_view: bool
    is_fresh: bool
    is_awaited: bool
    is_collective: bool


class Races(ObservingMode):
    """Watches operators; `found` lists races, each pair of places once.

    clocks: the streams; give them to `Device.modelling_streams`, and the object itself to
        `Device.watching_storages`.
    name: tensors that people know, asked for when a race is found.
    units: name of the unit of each owner of pool buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clocks = Clocks()
        self.found: list[Race] = []
        self.named: Callable[[], Iterable[Named]] = lambda: ()
        self.units: dict[int, str] = {}
        self._memory: dict[int, _Memory] = {}
        self._kinds: dict[Any, _Kind] = {}
        self._seen: set[tuple[object, ...]] = set()
        self._lending = Lending()
        self._place: str | None = None
        """Where the operator was called that is being looked at, once anybody asked."""

    def require_none(self) -> None:
        """Raise what was found since the last time (`RaceFound`: there were races)."""
        found, self.found = self.found, []
        if found:
            raise RaceFound(found)

    def label(self, key: Key, buffer: torch.Tensor) -> None:
        """Say whose key holds a buffer of a pool from now on, and after that until the next."""
        self._place = None
        self._memory_of(buffer.untyped_storage(), "the pool").label = key

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(map(opens_itself, types)):
            return NotImplemented  # the wrapper opens itself up first
        kwargs = kwargs or {}
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind_of(func)
        self._lending.let_go()
        if kind.is_collective:
            out = self._lending.call(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        self._place = None
        if kind.is_view:
            return out
        if kind.name in ALLOCATIONS:
            # No kernel runs, but work that had this memory before may: whoever uses it must come
            # after what its stream has been given so far.
            self._touch_all(out, kind.name, writes=True)
            return out
        self.clocks.current_stream().issue()
        if kind.name.startswith("c10d::"):
            self._collective(kind.name, args)
            return out
        source, written = None, [out] if kind.is_fresh else []
        for name, value in (*zip(kind.arguments, args, strict=False), *kwargs.items()):
            if name in kind.writes:
                written.append(value)
            else:
                source = self._touch_all(value, kind.name, writes=False) or source
        for value in written:
            self._touch_all(value, kind.name, writes=True, source=source)
        if kind.is_awaited:
            self.clocks.current_stream().synchronize()
        return out

    def _collective(self, name: str, args: Any) -> None:
        """c10d's schemas mark few outputs: they are in the first argument, unless it is sent."""
        source = None
        for value in args[1:]:
            source = self._touch_all(value, name, writes=False) or source
        self._touch_all(args[0], name, writes=name != "c10d::send", source=source)

    def _touch_all(
        self, value: Any, operator: str, *, writes: bool, source: Key | None = None
    ) -> Key | None:
        """Note the accesses to the tensors in `value`; the pool's buffer that they come from."""
        found = None
        for leaf in tree_iter(value) if isinstance(value, list | tuple | dict) else (value,):
            if isinstance(leaf, torch.Tensor):
                found = self._touch(leaf, operator, writes=writes, source=source) or found
        return found

    def _touch(
        self, tensor: torch.Tensor, operator: str, *, writes: bool, source: Key | None
    ) -> Key | None:
        is_memory = tensor.layout == torch.strided and not tensor.is_meta
        if not is_memory or tensor.numel() == 0 or opens_itself(type(tensor)):
            return None
        start = int(tensor.storage_offset()) * tensor.element_size()
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        stop = start + (reach + 1) * tensor.element_size()
        storage = tensor.untyped_storage()
        memory = self._memory_of(storage, operator)
        if writes and source is not None:
            memory.source = source
        self._access(storage._cdata, memory, (start, stop), operator, writes=writes)
        return memory.label or memory.source

    def _access(
        self, key: int, memory: _Memory, span: tuple[int, int], operator: str, *, writes: bool
    ) -> None:
        stream = self.clocks.current_stream()
        start, stop = span
        if self._place is None:
            self._place = _calling_place()
        now = Access(start, stop, stream, stream.time, writes, operator, self._place)
        kept = []
        for old in memory.accesses:
            if old.stop <= start or stop <= old.start:
                kept.append(old)
                continue
            if old.writes or writes:
                self._require_order(key, memory, old, now)
            # Who comes after this access comes after the ones that it covers.
            covered = start <= old.start and old.stop <= stop
            if not (covered and (writes or (old.stream is stream and not old.writes))):
                kept.append(old)
        kept.append(now)
        memory.accesses = kept

    def _require_order(self, key: int, memory: _Memory, old: Access, now: Access) -> None:
        if now.stream.comes_after(old.stream, old.time):
            return
        tensor, unit, is_gradient = self._name(key, memory, now)
        pair = (tensor, old.operator, old.place, old.writes, now.operator, now.place, now.writes)
        if pair not in self._seen:
            self._seen.add(pair)
            self.found.append(Race(tensor, unit, old, now, is_gradient))

    def _name(self, key: int, memory: _Memory, now: Access) -> tuple[str, str, bool]:
        """Name and unit of what lies there, and whether it is gradients."""
        if memory.label is not None:
            return self._buffer(memory.label)
        for name, unit, tensor, is_gradient in self.named():
            if tensor.untyped_storage()._cdata == key and tensor.numel():
                start = int(tensor.storage_offset()) * tensor.element_size()
                if start < now.stop and now.start < start + tensor.numel() * tensor.element_size():
                    return name, unit, is_gradient
        made = f"memory made by {memory.made_by}"
        if memory.source is None:
            return made, "", False
        name, unit, is_gradient = self._buffer(memory.source)
        return f"{made} for the {name}", unit, is_gradient

    def _buffer(self, key: Key) -> tuple[str, str, bool]:
        unit = self.units.get(key.owner, f"number {key.owner}")
        return f"{key.role} buffer", unit, key.role == GRAD

    def _memory_of(self, storage: torch.UntypedStorage, operator: str) -> _Memory:
        key = storage._cdata
        memory = self._memory.get(key)
        if memory is None or memory.reference() is None:
            reference = weakref.ref(storage, lambda gone: self._die(key, gone))
            home = self.clocks.current_stream()
            if self._place is None:
                self._place = _calling_place()
            made_by = f"{operator} at {self._place}"
            memory = self._memory[key] = _Memory(home, reference, made_by)
        return memory

    def _die(self, key: int, reference: Any) -> None:
        memory = self._memory.get(key)
        if memory is not None and memory.reference is reference:
            del self._memory[key]
            self._free(key, memory)

    def _free(self, key: int, memory: _Memory) -> None:
        home, place = memory.home, _calling_place()
        for old in memory.accesses:
            now = Access(old.start, old.stop, home, home.time, True, "reuse", place)
            self._require_order(key, memory, old, now)
        memory.accesses = []

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage was emptied or filled in place: memory died or was allocated."""
        self._place = None
        memory = self._memory_of(storage, "resize")
        self._free(storage._cdata, memory)
        if storage.nbytes():
            memory.home = self.clocks.current_stream()
            self._access(storage._cdata, memory, (0, storage.nbytes()), "resize", writes=True)


def _kind_of(func: Any) -> _Kind:
    schema, is_changed = func._schema, lambda alias: alias is not None and alias.is_write
    returned = [each.alias_info for each in schema.returns]
    return _Kind(
        name=schema.name,
        writes=frozenset(each.name for each in schema.arguments if is_changed(each.alias_info)),
        arguments=tuple(each.name for each in schema.arguments),
        is_view=bool(returned) and all(a is not None and not a.is_write for a in returned),
        is_fresh=all(a is None for a in returned),
        is_awaited=torch.Tag.data_dependent_output in func.tags or schema.name in _SIZED_BY_DATA,
        is_collective=is_collective(func),
    )


def _calling_place() -> str:
    return calling_line(sys._getframe(1)) or "an unknown place"
