"""Streams, events and memory counters of cuda and cpu: the one place that asks which device it is.

On the CPU every stream is a `HostStream`: work runs at once and in order, so waiting costs nothing
and is always satisfied. Memory on the CPU is counted as live tensor storage (`StorageCounter`).

Here, too, is what counts that storage (resident size also counts what the allocator keeps), and
every switch that decides whether two runs of one program give the same bits:
`prepare_environment` before CUDA starts (cuBLAS reads its workspace setting once),
`make_deterministic` before the model is built.

gloo's threads answer first and drop their references then, so tensors of a collective that is over
live on for as long as the thread waits for a processor, and two counts differ. So `Lending` gives
collectives aliases, tensors over the same memory that do not own it:

    argument    alias --> gloo; the tensor itself is held here while the work runs
    result      alias --> program; gloo's own tensor is held here until the alias dies

torch knows functional collectives by their result's storage, so `wait_tensor` of an alias is passed
on to what it stands for. Nothing is waited for that the program does not wait for.
"""

import contextlib
import os
import random
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_iter, tree_leaves, tree_map_only

from fsdp_core.dispatch import ObservingMode, is_fake, opens_itself

_OF_NO_THREAD = frozenset(("barrier", "monitored_barrier_", "send", "recv_", "recv_any_source_"))
"""Operators of c10d without tensors, or whose tensors only their `Work` holds."""
_NOBODY = "fake"
"""torch's backend that does nothing."""
_WAIT = "_c10d_functional::wait_tensor"
_WRAP = "_c10d_functional::_wrap_tensor_autograd"
"""No collective: since torch 2.13 it makes the result of one the tensor that waits for itself."""
_RESIZING = ("aten::resize_", "aten::resize_as_", "aten::set_")

Lent = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Alias and original, by the alias's identity."""


def is_collective(func: Any) -> bool:
    """Whether `func` is one of c10d's operators, functional or not, that threads work on."""
    name: str = func._schema.name
    return name.startswith(("c10d::", "_c10d_functional::")) and name != _WRAP


@dataclass
class _Result:
    """What a functional collective gave: `own` is gloo's, which an alias in the program shows."""

    alias: weakref.ref[Any]
    own: torch.Tensor
    lent: list[torch.Tensor]


class Lending:
    """Runs collectives of CPU tensors on aliases, for a dispatch mode."""

    def __init__(self) -> None:
        self._held: list[tuple[Any, list[torch.Tensor]]] = []
        self._results: dict[int, _Result] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator, one that `is_collective`; its result is what the program is to get."""
        schema: str = func._schema.name
        namespace, _, name = schema.partition("::")
        if schema == _WAIT:
            return self._wait(func, args[0])
        if name in _OF_NO_THREAD:
            return func(*args, **kwargs)
        lent: Lent = {}

        def lend(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "cpu":
                return tensor
            alias = _alias(tensor)
            lent[id(alias)] = alias, tensor
            return alias

        def show(own: torch.Tensor) -> torch.Tensor:
            if namespace == "c10d" and id(own) in lent:
                return lent[id(own)][1]
            return self._show(own, lent)

        args, kwargs = tree_map_only(torch.Tensor, lend, (args, kwargs))
        out = func(*args, **kwargs)
        if namespace == "c10d":
            self._hold(out, lent, is_waited=_argument(func, args, kwargs, "async_op") is False)
        return tree_map_only(torch.Tensor, show, out)

    def let_go(self) -> None:
        if self._held:
            self._held = [each for each in self._held if not each[0].is_completed()]

    def _hold(self, out: Any, lent: Lent, *, is_waited: bool) -> None:
        for leaf in tree_leaves(out):
            if not isinstance(leaf, torch.ScriptObject):
                continue
            work = dist.Work.unbox(leaf)
            if is_waited or dist.get_backend() == _NOBODY:
                # The caller does so next; until then it has the tensors itself. Work of a rank
                # that is alone in its world is never said to be over, and nothing is sent.
                work.wait()
            else:
                self._held.append((work, [tensor for _, tensor in lent.values()]))

    def _show(self, own: torch.Tensor, lent: Lent) -> torch.Tensor:
        """What stands for a functional collective's result; a tensor in place stands for itself."""
        shown = lent[id(own)][1] if id(own) in lent else _alias(own)
        storage = shown.untyped_storage()
        key = storage._cdata
        gone = weakref.ref(storage, lambda reference: self._forget(key, reference))
        self._results[key] = _Result(gone, own, [tensor for _, tensor in lent.values()])
        return shown

    def _forget(self, key: int, reference: Any) -> None:
        found = self._results.get(key)
        if found is not None and found.alias is reference:
            del self._results[key]

    def _wait(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        found = self._results.get(tensor.untyped_storage()._cdata)
        if found is None:
            waited: torch.Tensor = func(tensor)
            return waited
        func(found.own)
        found.lent = []
        return tensor


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> object:
    """An operator's argument; None if it has none of that name."""
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
    given = dict(zip(defaults, args, strict=False)) | kwargs
    return given.get(name, defaults.get(name))


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory, which does not keep it alive."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return tensor
    over = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), storage.device, storage.nbytes()
    )
    alias = torch.empty(0, dtype=tensor.dtype)
    return alias.set_(over, tensor.storage_offset(), tensor.size(), tensor.stride())


class _StorageRef(weakref.ref[Any]):
    __slots__ = ("key",)
    key: int


class _Kind(NamedTuple):
    makes: bool
    resizes: bool
    lends: bool


def _kind_of(func: Any) -> _Kind:
    schema = func._schema
    # c10d's schemas do not say so: what they return is what they were given to fill.
    passes_on = schema.name.startswith("c10d::") or any(
        each.alias_info is not None for each in schema.returns
    )
    resizes = schema.name in _RESIZING or any(a.name == "out" for a in schema.arguments)
    return _Kind(not passes_on, resizes, is_collective(func))


class StorageCounter(ObservingMode):
    """Counts bytes of live CPU tensor storage, and their peak, while it is active.

    A storage is counted when an operator makes it and uncounted when it dies. One that an operator
    only passes on is not: a library's own buffer (gloo has some) lives as long as its threads
    please. `resized` must be told of `UntypedStorage.resize_`, which is no operator.

    collectives: None, or whose `entering(func, args)` and `left()` are called around each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.collectives: Any = None
        self._known: dict[int, tuple[_StorageRef, int]] = {}
        self._kinds: dict[Any, _Kind] = {}
        self._lending = Lending()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(map(opens_itself, types)):
            if is_fake(types):
                return func(*args, **(kwargs or {}))
            return NotImplemented  # the wrapper opens itself up first; what it holds is counted
        # This runs for every operator of every rank, so it looks at as little as it can.
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind_of(func)
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
        known = self._known.get(storage._cdata)
        if known is not None:
            self._known[storage._cdata] = (known[0], storage.nbytes())
            self._change(storage._cdata, storage.nbytes() - known[1])

    def _forget(self, reference: _StorageRef) -> None:
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
        self._lending.let_go()


# ---- devices


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
        return HostEvent()


_HOST_STREAM = HostStream()


class HostStreams:
    """The streams of the CPU, and what stands for them in `Device.modelling_streams`."""

    def new_stream(self, name: str) -> Any:
        del name
        return _HOST_STREAM

    def current_stream(self) -> Any:
        return _HOST_STREAM

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        del stream
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        """The host waits for all issued work."""


_HOST_STREAMS = HostStreams()


@dataclass
class _Watched:
    """Who follows the memory and the streams of a device, shared by all `Device` objects of it."""

    counter: StorageCounter | None = None
    watchers: list[Any] = field(default_factory=list)
    streams: HostStreams = _HOST_STREAMS


_WATCHED: dict[torch.device, _Watched] = {}


class Device:
    """One rank's device: `kind` is cpu or cuda, `index` its number among the visible ones. `Objects
    are interchangeable`: memory counted through one is counted through all.
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
        return self._watched.counter

    @property
    def storage_watchers(self) -> tuple[Any, ...]:
        return tuple(self._watched.watchers)

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def collective_backend(self) -> str:
        return "nccl" if self.is_cuda else "gloo"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device) if self.is_cuda else "cpu"

    def new_stream(self, name: str = "") -> Any:
        """A new side stream; who watches streams calls it by its name."""
        if self.is_cuda:
            return torch.cuda.Stream(self.torch_device)
        return self._watched.streams.new_stream(name)

    def current_stream(self) -> Any:
        if self.is_cuda:
            return torch.cuda.current_stream(self.torch_device)
        return self._watched.streams.current_stream()

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream) if self.is_cuda else self._watched.streams.on(stream)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)
        else:
            self._watched.streams.synchronize()

    @contextlib.contextmanager
    def modelling_streams(self, streams: HostStreams) -> Iterator[None]:
        """Let `streams` stand for those of the CPU inside (`RuntimeError`: it has others)."""
        if self.is_cuda or self._watched.streams is not _HOST_STREAMS:
            got = "cuda" if self.is_cuda else "one"
            raise RuntimeError(f"Expected device cpu and no other model of its streams, got {got}.")
        self._watched.streams = streams
        try:
            yield
        finally:
            self._watched.streams = _HOST_STREAMS

    @contextlib.contextmanager
    def counting_memory(self, counter: StorageCounter | None = None) -> Iterator[None]:
        """Count inside: the allocator's counters on cuda, storages on the CPU, by `counter`."""
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
        """What the driver says is used on the whole GPU, of all processes; None on the CPU."""
        if not self.is_cuda:
            return None
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return int(total - free)

    @contextlib.contextmanager
    def watching_storages(self, watcher: Any) -> Iterator[None]:
        """Call `watcher.resized(storage)` for every storage of this device that is resized."""
        self._watched.watchers.append(watcher)
        try:
            yield
        finally:
            self._watched.watchers.remove(watcher)

    def resize_storage(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Resize a storage in place, keeping its identity and the memory count right."""
        storage.resize_(nbytes)
        for follower in (self.counter, *self.storage_watchers):
            if follower is not None:
                follower.resized(storage)

    def rng_states(self) -> list[torch.Tensor]:
        """Copies of every default generator state of this rank, in a fixed order."""
        states = [torch.get_rng_state()]
        if self.is_cuda:
            states.append(torch.cuda.get_rng_state(self.torch_device))
        return states

    def set_rng_states(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self.is_cuda:
            torch.cuda.set_rng_state(states[1], self.torch_device)


class RngStates:
    """States of a device's default generators and of others; put back at the end of a `with`."""

    def __init__(self, device: Device, generators: Iterable[torch.Generator] = ()) -> None:
        self._device, self._defaults = device, device.rng_states()
        self._others = [(generator, generator.get_state()) for generator in generators]

    def put_back(self) -> None:
        self._device.set_rng_states(self._defaults)
        for generator, state in self._others:
            generator.set_state(state)

    def __enter__(self) -> "RngStates":
        return self

    def __exit__(self, *_: object) -> None:
        self.put_back()


# ---- what decides whether two runs give the same bits


def prepare_environment() -> None:
    """Set the variables that libraries read once; a value that the user set is kept."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


def make_deterministic(seed: int) -> None:
    """Ask for deterministic kernels and seed every default generator with `seed`."""
    torch.use_deterministic_algorithms(True)
    # Filling new memory would hide what a graph leaves in it and costs a kernel an allocation.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    seed_all(seed)


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and every torch generator."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
