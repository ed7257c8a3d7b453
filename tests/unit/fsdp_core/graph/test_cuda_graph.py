"""What is done about captures that CUDA refuses, over a stand-in for `torch.cuda`."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fsdp_core.device import Device
from fsdp_core.graph import device_graphs
from fsdp_core.graph.device_graphs import CudaGraph, MemoryPool, PrivateMemory
from fsdp_core.graph.recorder import CaptureRefused, Recording, StorageEntry

INVALID = "operation failed due to a previous error during capture"


class Driver:
    """As torch 2.11 does: an end that raises tells neither the allocator nor the generators.

    Attributes:
        refuses: the end of the next capture raises.
        allocating: pools that the allocator takes to be captured into.
        drawing: generators that take themselves to be captured.
        used: pools of captures that began.
    """

    def __init__(self) -> None:
        self.refuses = False
        self.allocating: set[Any] = set()
        self.drawing: set[Any] = set()
        self.used: list[Any] = []
        self._handles = iter(range(1, 100))

    def handle(self) -> tuple[int, int]:
        return 0, next(self._handles)

    def stop_allocating(self, index: int | None, pool: Any) -> None:
        if pool not in self.allocating:
            raise RuntimeError("not currently recording to mempool_id")
        self.allocating.remove(pool)


class Graph:
    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._registered: list[Any] = ["default"]
        self._pool: Any = None

    def register_generator_state(self, generator: Any) -> None:
        self._registered.append(generator)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local"
        self._pool = pool or self._driver.handle()
        assert not self._driver.allocating, "the allocator is in a capture"
        self._driver.used.append(self._pool)
        self._driver.allocating.add(self._pool)
        self._driver.drawing |= set(self._registered)

    def capture_end(self) -> None:
        if self._driver.refuses:
            self._driver.refuses = False
            raise torch.AcceleratorError(INVALID)
        self._driver.allocating.remove(self._pool)
        self._driver.drawing -= set(self._registered)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()

    @contextlib.contextmanager
    def capturing(graph: Graph, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            graph.capture_end()

    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda *_, **__: [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(made))
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", made.handle)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.stop_allocating, raising=False)
    return made


class Generator:
    def get_state(self) -> int:
        return 7

    def set_state(self, state: int) -> None:
        assert state == 7


def refused(driver: Driver, pool: MemoryPool, function: Callable[[], Any]) -> Exception:
    graph = CudaGraph(Device("cpu"), pool, [Generator()])  # type: ignore[list-item]
    driver.refuses = True
    with pytest.raises(CaptureRefused) as raised:
        graph.capture(function)
    assert not graph.is_captured
    return raised.value


def reads_on_the_host() -> None:
    raise torch.AcceleratorError("operation not permitted when stream is capturing")


def test_a_refusal_names_the_first_error(driver: Driver) -> None:
    """Not the end's, which says no more than that something was wrong before."""
    error = refused(driver, MemoryPool(), reads_on_the_host)
    assert "not permitted when stream is capturing" in str(error)
    assert INVALID not in str(error)


def test_a_refusal_at_the_end_says_so(driver: Driver) -> None:
    """Work on a stream that was not joined, say."""
    assert INVALID in str(refused(driver, MemoryPool(), lambda: None))


@pytest.mark.parametrize("function", [reads_on_the_host, lambda: None])
def test_nothing_is_left_capturing(driver: Driver, function: Callable[[], Any]) -> None:
    """Eager work may draw and free again, and the next capture has a pool of its own."""
    pool = MemoryPool()
    kept = CudaGraph(Device("cpu"), pool)
    kept.capture(lambda: None)
    refused(driver, pool, function)
    assert not driver.allocating
    assert not driver.drawing
    later = [CudaGraph(Device("cpu"), pool) for _ in range(2)]
    for graph in later:
        graph.capture(lambda: None)
    first, spoilt, *_, third, fourth = driver.used
    assert first == spoilt != third == fourth


def test_an_error_of_the_program_is_left_as_it_is(driver: Driver) -> None:
    """Where CUDA has nothing against the capture, nothing has to be put right."""

    def fails() -> None:
        raise ValueError("Expected another thing.")

    graph = CudaGraph(Device("cpu"), MemoryPool())
    with pytest.raises(ValueError, match="another thing"):
        graph.capture(fails)
    assert len(driver.used) == 1
    assert not driver.drawing


class Pool:
    """A memory pool whose blocks a test sets, and what recorders have seen of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks: list[tuple[int, int]] = []
        self.held: list[torch.UntypedStorage] = []
        monkeypatch.setattr(device_graphs, "blocks_of", lambda _: list(self.blocks))

    def entry(self, address: int, *, internal: bool = False) -> StorageEntry:
        """A storage of 64 bytes at `address`, as a recorder met it; it lives until `drop`."""
        storage = torch.UntypedStorage(64)
        self.held.append(storage)
        return StorageEntry(64, address, internal, weakref.ref(storage), 0, 0, False, "aten.mm.out")

    def drop(self) -> None:
        self.held.pop(0)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    return Pool(monkeypatch)


BLOCK = (4096, 4608)


@pytest.mark.parametrize(
    ("was_there", "earlier", "dies", "address", "own"),
    [
        pytest.param(False, False, "", 4096, True, id="allocated during the capture"),
        pytest.param(False, False, "", 65536, False, id="outside of the pool"),
        pytest.param(True, True, "", 4096, False, id="left by an earlier graph"),
        pytest.param(True, True, "during", 4096, True, id="freed by it and used again"),
        pytest.param(True, True, "before", 4096, False, id="died before the capture"),
        pytest.param(True, False, "during", 4096, True, id="only this capture saw it die"),
    ],
)
def test_which_memory_is_a_captures_own(
    pool: Pool, was_there: bool, earlier: bool, dies: str, address: int, own: bool
) -> None:
    """What it allocated, or freed and used again; what an earlier graph left must be watched."""
    pool.blocks = [BLOCK] * was_there
    old = pool.entry(4096, internal=earlier)
    if dies == "before":
        pool.drop()
    memory = PrivateMemory((0, 1), [Recording([old])] if earlier else [])
    if dies == "during":
        pool.drop()
    made = pool.entry(address)
    if earlier and not dies:
        made = StorageEntry(64, 4096, False, old.reference, 0, 0, False, "aten.mm.out")
    pool.blocks = [BLOCK]
    seen = [old, made] if was_there and not earlier else [made]
    memory.mark_own(Recording(seen))
    assert made.internal is own
