"""Streams, events and memory counters of cuda and cpu: the one place that asks which device it is.

On the CPU every stream is a `HostStream`: work runs at once and in order, so waiting costs nothing
and is always satisfied. Memory on the CPU is counted as live tensor storage (`StorageCounter`),
because resident size also counts what the allocator keeps, which is noise.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fsdp_core.lending import Lending, is_collective


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """An ordered queue of device work."""

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self) -> Any: ...


class StorageWatcher(Protocol):
    """Is told when a storage changes its size in place, which no operator shows."""

    def resized(self, storage: torch.UntypedStorage) -> None: ...


class CollectiveWatcher(Protocol):
    """Is told of collectives on the CPU as they are called and as they come back."""

    def entering(self, func: Any, args: tuple[Any, ...]) -> None: ...
    def left(self) -> None: ...


class StreamModel(Protocol):
    """Streams of the CPU in the place of `HostStream`, for who watches how work is ordered."""

    def new_stream(self, name: str) -> Any:
        """A side stream; `name` may be empty."""

    def current_stream(self) -> Any:
        """The stream that work is issued on now."""

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Issue work on `stream` inside the context."""

    def synchronize(self) -> None:
        """The host waits for all issued work."""


class HostEvent:
    """An event of a `HostStream`: always complete, because host work runs when it is issued."""

    def synchronize(self) -> None:
        """Return at once."""


class HostStream:
    """A stream of the CPU: work runs when it is issued, so every wait is already satisfied."""

    def wait_stream(self, stream: "HostStream") -> None:
        """Order after another stream's work: already so."""

    def wait_event(self, event: HostEvent) -> None:
        """Order after an event: already so."""

    def record_event(self) -> HostEvent:
        """Mark this point."""
        return HostEvent()


def opens_itself(kind: type) -> bool:
    """Whether operators on a tensor class become operators on the tensors that it holds."""
    dispatch: object = getattr(kind, "__torch_dispatch__", None)
    return dispatch is not torch._C._disabled_torch_dispatch_impl


class _StorageRef(weakref.ref[Any]):
    """A weak reference that knows which storage it was."""

    __slots__ = ("key",)
    key: int


def _passes_on(func: Any) -> bool:
    """Whether the operator's results are, by its schema, its own arguments or views of them."""
    # c10d's schemas do not say so: what they return is what they were given to fill.
    is_c10d = func._schema.name.startswith("c10d::")
    return is_c10d or any(returned.alias_info is not None for returned in func._schema.returns)


def _resizes(func: Any) -> bool:
    """Whether the operator may change the size of a storage that it is given."""
    names = {argument.name for argument in func._schema.arguments}
    return "out" in names or func._schema.name in (
        "aten::resize_", "aten::resize_as_", "aten::set_",
    )  # fmt: skip


def is_fake(kinds: Iterable[type]) -> bool:
    """Whether an operator's tensors are to know shapes alone, as where DTensor plans its own.

    Modes must hand these on: no other mode is asked once one does not implement them.
    """
    return any(issubclass(kind, FakeTensor) for kind in kinds)


class StorageCounter(TorchDispatchMode):
    """Counts bytes of live CPU tensor storage, and their peak, while it is active.

    A storage is counted when an operator makes it and uncounted when it dies. One that an operator
    only passes on is not: a library's own buffer (gloo has some) lives as long as its threads
    please, and two runs would not count the same. For the same reason collectives get aliases (see
    `lending`). `resized` must be told of `UntypedStorage.resize_`, which is no operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, tuple[_StorageRef, int]] = {}
        self._kinds: dict[Any, tuple[bool, bool, bool]] = {}
        self._lending = Lending()
        self.collectives: CollectiveWatcher | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapper that keeps the compiler out: nothing here is compiled, every operator pays."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """The compiler works as if nobody looked on; without this it steps aside."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count the storages that it makes."""
        if types and any(map(opens_itself, types)):
            if is_fake(types):
                return func(*args, **(kwargs or {}))
            return NotImplemented  # the wrapper opens itself up first; what it holds is counted
        # This runs for every operator of every rank, so it looks at as little as it can.
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = (not _passes_on(func), _resizes(func), is_collective(func))
        makes, resizes, lends = kind
        self._lending.let_go()
        if lends:
            if self.collectives is not None:
                self.collectives.entering(func, args)
            out = self._lending.call(func, args, kwargs or {})
            if self.collectives is not None:
                self.collectives.left()
        else:
            out = func(*args, **(kwargs or {}))
        if not (makes or resizes):
            return out
        if type(out) is torch.Tensor:
            self._see(out, makes=makes)
            return out
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor) and not opens_itself(type(value)):
                self._see(value, makes=makes)
        return out

    def _see(self, tensor: torch.Tensor, *, makes: bool) -> None:
        """Count the storage of an operator's output if the operator made it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is not None and known[0]() is not None:
            if known[1] != storage.nbytes():
                self.resized(storage)
        elif makes:
            nbytes = storage.nbytes()
            reference = _StorageRef(storage, self._forget)
            reference.key = key
            self._known[key] = (reference, nbytes)
            self._change(key, nbytes)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Correct the count after a storage changed its size."""
        known = self._known.get(storage._cdata)
        if known is not None:
            self._known[storage._cdata] = (known[0], storage.nbytes())
            self._change(storage._cdata, storage.nbytes() - known[1])

    def _forget(self, reference: "_StorageRef") -> None:
        known = self._known.pop(reference.key, None)
        if known is not None:
            self._change(reference.key, -known[1])

    def _change(self, key: int, delta: int) -> None:
        del key  # who follows single storages is told which it is
        self.live_bytes += delta
        # A death on another thread, between two looks at the peak, must not take back a higher one.
        if delta > 0:
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def settle(self) -> None:
        """Let go of what collectives that are over were lent."""
        self._lending.let_go()


@dataclass
class _Watched:
    """Who follows the memory of a device: shared by all `Device` objects that mean it."""

    counter: StorageCounter | None = None
    watchers: list["StorageWatcher"] = field(default_factory=list)
    streams: StreamModel | None = None


_WATCHED: dict[torch.device, _Watched] = {}


class Device:
    """One rank's device: `kind` is cpu or cuda, `index` its number among the visible ones.

    Objects are interchangeable: memory counted through one is counted through all.
    """

    def __init__(self, kind: str, index: int = 0) -> None:
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"Expected device cpu or cuda, got {kind!r}.")
        if kind == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("device cuda was asked for, but torch sees no CUDA device")
        self.kind = kind
        self.torch_device = torch.device(kind, index) if kind == "cuda" else torch.device("cpu")
        self._watched = _WATCHED.setdefault(self.torch_device, _Watched())
        if kind == "cuda":
            torch.cuda.set_device(self.torch_device)

    @property
    def counter(self) -> StorageCounter | None:
        """Counts CPU memory inside `counting_memory`."""
        return self._watched.counter

    @property
    def storage_watchers(self) -> tuple["StorageWatcher", ...]:
        """Who is told of every storage that is resized."""
        return tuple(self._watched.watchers)

    @property
    def is_cuda(self) -> bool:
        """Whether work is asynchronous CUDA work."""
        return self.kind == "cuda"

    @property
    def collective_backend(self) -> str:
        """Process-group backend of this device."""
        return "nccl" if self.is_cuda else "gloo"

    @property
    def name(self) -> str:
        """Model name of the device."""
        return torch.cuda.get_device_name(self.torch_device) if self.is_cuda else "cpu"

    def new_stream(self, name: str = "") -> Any:
        """A new side stream; who watches streams calls it by its name."""
        if self.is_cuda:
            return torch.cuda.Stream(self.torch_device)
        streams = self._watched.streams
        return HostStream() if streams is None else streams.new_stream(name)

    def current_stream(self) -> Any:
        """The stream that work is issued on now."""
        if self.is_cuda:
            return torch.cuda.current_stream(self.torch_device)
        streams = self._watched.streams
        return HostStream() if streams is None else streams.current_stream()

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Issue work on `stream` inside the context."""
        if self.is_cuda:
            return torch.cuda.stream(stream)
        streams = self._watched.streams
        return contextlib.nullcontext() if streams is None else streams.on(stream)

    def synchronize(self) -> None:
        """Wait for all issued work."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)
        elif self._watched.streams is not None:
            self._watched.streams.synchronize()

    @contextlib.contextmanager
    def modelling_streams(self, streams: StreamModel) -> Iterator[None]:
        """Let `streams` stand for the streams of the CPU inside.

        What is made inside keeps its streams, so it is to be used inside only.

        Raises:
            RuntimeError: the device has streams of its own, or another model.
        """
        if self.is_cuda:
            raise RuntimeError("Expected device cpu to model the streams of, got cuda.")
        if self._watched.streams is not None:
            raise RuntimeError("Expected no other model of the CPU's streams, got one.")
        self._watched.streams = streams
        try:
            yield
        finally:
            self._watched.streams = None

    @contextlib.contextmanager
    def counting_memory(self, counter: StorageCounter | None = None) -> Iterator[None]:
        """Count memory inside: the allocator's own counters on cuda, live storage on the CPU.

        Args:
            counter: counts on the CPU; None for a plain one.
        """
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.torch_device)
            yield
            return
        if self.counter is not None:
            raise RuntimeError("Expected no other counting of this device's memory, got one.")
        self._watched.counter = counter or StorageCounter()
        try:
            with self._watched.counter:
                yield
        finally:
            self._watched.counter = None

    def live_bytes(self) -> int:
        """Bytes in use now; 0 on the CPU outside `counting_memory`."""
        if self.is_cuda:
            return torch.cuda.memory_allocated(self.torch_device)
        if self.counter is None:
            return 0
        self.counter.settle()
        return self.counter.live_bytes

    def peak_bytes(self) -> int:
        """Highest bytes in use since counting began; 0 on the CPU outside `counting_memory`."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.torch_device)
        return self.counter.peak_bytes if self.counter else 0

    def used_bytes(self) -> int | None:
        """What the driver says is used on the whole GPU, of all processes; None on the CPU.

        It sees what no allocator of torch counts: libraries' own memory, graphs, fragmentation.
        """
        if not self.is_cuda:
            return None
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return int(total - free)

    @contextlib.contextmanager
    def watching_storages(self, watcher: StorageWatcher) -> Iterator[None]:
        """Tell `watcher` of every storage of this device that is resized inside."""
        self._watched.watchers.append(watcher)
        try:
            yield
        finally:
            self._watched.watchers.remove(watcher)

    def resize_storage(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Resize a storage in place, keeping its identity and the memory count right."""
        storage.resize_(nbytes)
        if self.counter is not None:
            self.counter.resized(storage)
        for watcher in self.storage_watchers:
            watcher.resized(storage)

    def rng_states(self) -> list[torch.Tensor]:
        """Copies of every default generator state of this rank, in a fixed order."""
        states = [torch.get_rng_state()]
        if self.is_cuda:
            states.append(torch.cuda.get_rng_state(self.torch_device))
        return states

    def set_rng_states(self, states: list[torch.Tensor]) -> None:
        """Put back what `rng_states` returned."""
        torch.set_rng_state(states[0])
        if self.is_cuda:
            torch.cuda.set_rng_state(states[1], self.torch_device)
