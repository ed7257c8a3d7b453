"""Graphs of one device behind one interface: CUDA's, and the host's, what these are on the CPU.

A CUDA graph is `torch.cuda.CUDAGraph`. Capture mode is `thread_local`, because NCCL's watchdog
thread may query events while we capture. A `Recorder` runs around the capture, only to list the
external storages for the address ledger.

The host graph's capture runs the function once under a `Recorder`, then undoes it, so that
capturing has no effect. Replay runs the recorded operators into the same storages. Internal
storages that died during the capture share one arena, placed by live ranges, as in a graph's
private pool. External ones are not kept alive: a replay over what was freed raises. Random
operators draw from the default generator again, in the recorded order.
"""

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_core.device import Device, RngStates
from fsdp_core.graph.recorder import (
    CaptureRefused,
    HostReadGuard,
    Operation,
    OverCompiled,
    Recorder,
    Recording,
    StorageEntry,
    TensorRef,
    collector_off,
)

T = TypeVar("T")


class MemoryPool:
    """The private memory that graphs of one model share. torch gives a pool up once no captured
    graph is left in it and cannot capture into it again: the next graph then starts another.
    """

    def __init__(self) -> None:
        self._id = torch.cuda.graph_pool_handle()
        self._users: weakref.WeakSet[CudaGraph] = weakref.WeakSet()

    @property
    def id(self) -> Any:
        """The id to capture into, for graphs that are not ours."""
        if not any(user.is_captured for user in self._users):
            self._id = torch.cuda.graph_pool_handle()
        return self._id

    def join(self, graph: "CudaGraph") -> Any:
        """The id to capture `graph` into."""
        found = self.id
        self._users.add(graph)
        return found

    def recordings(self) -> list[Recording]:
        return [user.recording for user in self._users if user.is_captured]

    def give_up(self) -> None:
        """Start another; graphs that were captured into this one keep it."""
        self._id, self._users = torch.cuda.graph_pool_handle(), weakref.WeakSet()


class CudaGraph:
    """Capture and replay on one CUDA device. `memory_pool` is shared by graphs of one model.
    `generators` are those that the graph draws from beside the default one.
    """

    def __init__(
        self, device: Device, memory_pool: MemoryPool, generators: Sequence[torch.Generator] = ()
    ) -> None:
        self._device = device
        self._memory_pool = memory_pool
        self._graph = torch.cuda.CUDAGraph()
        self._generators = tuple(generators)
        self.is_captured = False
        self.recording = Recording()

    def capture(self, function: Callable[[], T]) -> T:
        """Capture `function` on the current stream; nothing of it runs on the device.
        `CaptureRefused` if CUDA refused an operation in it; the graph is then unusable.
        """
        recorder = OverCompiled(keep_operations=False, on_host=False)
        stream = torch.cuda.current_stream(self._device.torch_device)
        pool, first = self._memory_pool.join(self), None
        memory = PrivateMemory(pool, self._memory_pool.recordings())
        with RngStates(self._device, self._generators):
            for generator in self._generators:
                self._graph.register_generator_state(generator)
            try:
                with (
                    self._device.watching_storages(recorder),
                    torch.cuda.graph(
                        self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"
                    ),
                ):
                    try:
                        with recorder:
                            result = function()
                    except BaseException as error:
                        first = error  # how the capture ends follows from it
                        raise
            except RuntimeError as error:
                if error is not first:
                    end_refused(self._device, pool, self._generators)
                    self._memory_pool.give_up()
                cause = error if first is None else first
                if isinstance(cause, CaptureRefused) or not isinstance(cause, Exception):
                    raise cause from None
                raise CaptureRefused(f"cannot capture: {cause}") from cause
        self.recording = recorder.recording
        let_go_of_gradients(self._device)
        memory.mark_own(self.recording)
        self.is_captured = True
        return result

    def replay(self) -> None:
        if not self.is_captured:
            raise RuntimeError("Expected a captured graph, got an empty one.")
        self._graph.replay()

    def reset(self) -> None:
        """Destroy the graph; do so before its process groups are destroyed."""
        self._graph.reset()
        self.is_captured = False


def let_go_of_gradients(device: Device) -> None:
    """Wait until autograd's thread of a GPU holds none of the results that it has handed out.
    `torch.autograd.grad` returns before that thread has dropped its own references. On a busy
    machine a gradient that dies with the capture would still be found alive, and be watched.
    """
    # The thread takes its next task when it has dropped the last one; a view runs no kernel.
    spot = torch.empty(1, device=device.torch_device, requires_grad=True)
    with torch.enable_grad():
        seen = spot.view(1)
    torch.autograd.grad(seen, spot, torch.empty_like(seen))


def end_refused(device: Device, pool: Any, generators: Sequence[torch.Generator]) -> None:
    """After a capture that failed: tell torch's allocator and generators that it has ended.
    `CUDAGraph.capture_end` raises before it tells them (torch up to 2.12), and they would refuse to
    free memory and to draw outside of captures. The next capture needs another pool.
    """
    with contextlib.suppress(RuntimeError):  # it has been told
        torch._C._cuda_endAllocateToPool(device.torch_device.index, pool)
    # Generators are told of the end of a capture, and of nothing else: here is one. On a stream of
    # its own, as none can begin on the default one.
    with contextlib.suppress(RuntimeError), device.on(device.new_stream()):
        spot = torch.zeros(1, device=device.torch_device)
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        graph.capture_begin(capture_error_mode="thread_local")
        spot.add_(1.0)
        graph.capture_end()


Blocks = list[tuple[int, int]]
"""Allocated memory as (first byte, byte past the last one)."""


def blocks_of(pool: Any) -> Blocks:
    """What is allocated in a graph memory pool now, by address; no device work."""
    return [
        (block["address"], block["address"] + block["size"])
        for segment in torch.cuda.memory_snapshot(pool, include_traces=False)
        if tuple(segment["segment_pool_id"]) == tuple(pool)
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]


class PrivateMemory:
    """What is in a memory pool when a capture into it begins.

    Code that a compiler generated allocates past torch's dispatcher, so a recorder takes such
    storages for the program's. But in the private pool only captures allocate: a storage there is
    the capture's own, unless its block was there before and what held that has not died since.
    `earlier` are recordings of the graphs that are in the pool.
    """

    def __init__(self, pool: Any, earlier: Iterable[Recording]) -> None:
        self._pool = pool
        self._before = blocks_of(pool)
        self._held = [
            entry
            for recording in earlier
            for entry in recording.storages
            if entry.reference() is not None and _in(entry, self._before)
        ]

    def mark_own(self, recording: Recording) -> None:
        """After the capture: enter as internal what it allocated unseen."""
        external = recording.external()
        met = [entry for entry in external if entry.reference() is not None and entry.address]
        after = blocks_of(self._pool) if met else []
        died = [entry for entry in (*self._held, *external) if entry.reference() is None]
        for entry in met:
            if _in(entry, after):
                entry.internal = not _in(entry, self._before) or any(
                    _overlap(entry, other) for other in died
                )


def _in(entry: StorageEntry, blocks: Blocks) -> bool:
    return any(first <= entry.address < end for first, end in blocks)


def _overlap(one: StorageEntry, other: StorageEntry) -> bool:
    return one.address < other.address + other.nbytes and other.address < one.address + one.nbytes


# ---- the CPU's

_ALIGN_BYTES = 64


@dataclass(frozen=True)
class _Step:
    """One operator ready to run: outputs that are new storages are copied to their places."""

    func: Any
    args: Any
    kwargs: Any
    places: tuple[tuple[int, torch.Tensor], ...]


class HostGraph:
    """Capture and replay of CPU operators. `arena`: bytes of internal storages that died during the
    capture; None before it. With `holds_compiled` compiled code, all of it
    `fsdp_core.train.compiled` parts, runs compiled inside of a capture, as it does on CUDA.
    """

    def __init__(self, device: Device, *, holds_compiled: bool = False) -> None:
        self._device = device
        self._recorder = OverCompiled if holds_compiled else Recorder
        self._steps: list[_Step] = []
        self.arena: torch.Tensor | None = None
        self._externals: list[StorageEntry] = []
        # Tensors of the steps that lie in external storages, only during a replay.
        self._borrowed: list[tuple[torch.Tensor, TensorRef]] = []
        self.recording = Recording()

    def capture(self, function: Callable[[], T]) -> T:
        """Record `function`; its result's tensors get their values at each replay. `CaptureRefused`
        if it cannot be; nothing is left changed.
        """
        with self.capturing():
            result = function()
        return result

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Record what runs inside, as `capture` does; results must be held as it ends."""
        undo: list[tuple[torch.UntypedStorage, bytes]] = []

        def before_write(number: int, tensor: torch.Tensor) -> None:
            storage = tensor.untyped_storage()
            # Plain bytes, not a tensor: CUDA needs no undo, so it must not count as the program's.
            undo.append((storage, ctypes.string_at(storage.data_ptr(), storage.nbytes())))

        recorder = self._recorder(keep_operations=True, before_write=before_write)
        watching = self._device.watching_storages(recorder)
        try:
            with (
                collector_off(), RngStates(self._device), watching, HostReadGuard(),
                recorder,
            ):  # fmt: skip
                yield
        finally:
            for storage, saved in undo:
                self._restore(storage, saved)
        self.recording = recorder.recording
        self._build(self._living())

    def _restore(self, storage: torch.UntypedStorage, saved: bytes) -> None:
        if saved and storage.nbytes() != len(saved):
            # Resized inside the capture: writing into it as it is would write past its end.
            self._device.resize_storage(storage, len(saved))
        ctypes.memmove(storage.data_ptr(), saved, len(saved))

    def _living(self) -> dict[int, torch.UntypedStorage]:
        """Storages that are there after the capture, by number; externals have to be."""
        living = {}
        for number, entry in enumerate(self.recording.storages):
            if entry.released and not entry.internal and entry.nbytes:
                raise CaptureRefused(
                    f"cannot capture {entry.made_by}: it uses a storage of {entry.nbytes} bytes "
                    "that was made before the capture and is freed inside it; no replay finds it"
                )
            storage = None if entry.released else entry.reference()
            if storage is not None:
                living[number] = storage
            elif not entry.internal and not entry.released:
                raise CaptureRefused(
                    f"cannot capture {entry.made_by}: it reads a tensor that was made during the "
                    "capture by no operator (torch.from_numpy, say); make it before the capture"
                )
        return living

    def _build(self, living: dict[int, torch.UntypedStorage]) -> None:
        entries = self.recording.storages
        dead = [number for number in range(len(entries)) if number not in living]
        ranges = [(entries[n].nbytes, entries[n].first, entries[n].last) for n in dead]
        offsets, total = plan_arena(ranges)
        self.arena = torch.empty(total, dtype=torch.uint8)
        arena, starts = self.arena.untyped_storage(), dict(zip(dead, offsets, strict=True))
        self._externals = [entries[n] for n in living if not entries[n].internal]
        borrowed: dict[TensorRef, torch.Tensor] = {}

        def rebuild(ref: TensorRef) -> torch.Tensor:
            tensor = torch.empty(0, dtype=ref.dtype)
            # Such a view keeps its kind when it is set over a storage.
            tensor = tensor.conj() if ref.conjugate else tensor
            tensor = torch._neg_view(tensor) if ref.negative else tensor
            if ref.storage in starts:
                start = starts[ref.storage] // tensor.element_size()
                tensor.set_(arena, start + ref.offset, ref.size, ref.stride)
            elif entries[ref.storage].internal or not entries[ref.storage].nbytes:
                tensor.set_(living[ref.storage], ref.offset, ref.size, ref.stride)
            else:
                return borrowed.setdefault(ref, tensor)
            return tensor

        def step(operation: Operation) -> _Step:
            args, kwargs = tree_map_only(TensorRef, rebuild, (operation.args, operation.kwargs))
            places = tuple((index, rebuild(ref)) for index, ref in operation.fresh)
            return _Step(operation.func, args, kwargs, places)

        self._steps = [step(operation) for operation in self.recording.operations]
        self._borrowed = [(tensor, ref) for ref, tensor in borrowed.items()]
        # Arguments live on in the steps; the descriptions are only needed by the ledger.
        self.recording.operations = []

    def replay(self) -> None:
        """Run the recorded operators again, into the same storages. `RuntimeError` if an external
        storage was freed, has moved or shrunk: on CUDA an illegal access or a silent read of
        foreign memory.
        """
        if not self._steps:
            raise RuntimeError("Expected a captured graph, got an empty one.")
        for entry in self._externals:
            storage = entry.reference()
            where = (0, 0) if storage is None else (storage.nbytes(), storage.data_ptr())
            if where[0] < entry.nbytes or where[1] != entry.address:
                raise RuntimeError(
                    f"illegal memory access: the storage of {entry.nbytes} bytes that "
                    f"{entry.made_by} uses was at {entry.address:#x} at capture and has "
                    f"{where[0]} bytes at {where[1]:#x} at replay"
                )
        with torch.no_grad(), self._with_externals():
            for step in self._steps:
                outputs = tree_leaves(step.func(*step.args, **step.kwargs))
                if "c10d" in step.func.namespace:
                    _wait(outputs)
                for index, place in step.places:
                    place.copy_(outputs[index])

    @contextlib.contextmanager
    def _with_externals(self) -> Iterator[None]:
        """The steps' tensors of external storages over them, seen by no dispatch mode."""
        entries = self.recording.storages
        try:
            with _disable_current_modes():
                for tensor, ref in self._borrowed:
                    storage = entries[ref.storage].reference()
                    assert storage is not None
                    tensor.set_(storage, ref.offset, ref.size, ref.stride)
            yield
        finally:
            with _disable_current_modes():
                for tensor, _ in self._borrowed:
                    tensor.set_()  # type: ignore[call-overload]

    def reset(self) -> None:
        self._steps, self.arena, self._externals, self._borrowed = [], None, [], []


def plan_arena(ranges: list[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Place buffers of (bytes, first operation, last operation) into one arena: first fit, largest
    first. Returns an offset for each, and the arena's size. Buffers alive together never overlap.
    """
    order = sorted(range(len(ranges)), key=lambda i: -ranges[i][0])
    offsets = [0] * len(ranges)
    placed: list[int] = []
    for index in order:
        nbytes, first, last = ranges[index]
        busy = sorted(
            (offsets[other], offsets[other] + ranges[other][0])
            for other in placed
            if ranges[other][1] <= last and first <= ranges[other][2]
        )
        cursor = 0
        for start, stop in busy:
            if cursor + nbytes <= start:
                break
            cursor = max(cursor, -(-stop // _ALIGN_BYTES) * _ALIGN_BYTES)
        offsets[index] = cursor
        placed.append(index)
    total = max((offsets[i] + ranges[i][0] for i in range(len(ranges))), default=0)
    return offsets, total


def _wait(outputs: list[Any]) -> None:
    """Finish a collective: c10d returns a Work object, functional collectives a pending tensor."""
    for value in outputs:
        if isinstance(value, torch.ScriptObject):
            cast("Any", value).wait()  # torchbind methods are not in the stubs
        elif isinstance(value, torch.Tensor):
            torch.ops._c10d_functional.wait_tensor(value)
