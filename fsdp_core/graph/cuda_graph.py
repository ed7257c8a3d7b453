"""CUDA graphs: `torch.cuda.CUDAGraph` behind the interface that the host graph has.

Capture mode is `thread_local`, because NCCL's watchdog thread may query events while we capture. A
`Recorder` runs around the capture, only to list the external storages for the address ledger.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from fsdp_core.device import Device, RngStates
from fsdp_core.graph.recorder import CaptureRefused, OverCompiled, Recording, StorageEntry

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
        """Launch the graph on the current stream."""
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
