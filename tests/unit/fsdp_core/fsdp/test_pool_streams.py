"""Order between streams: no kernel may write memory that an earlier one still uses."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_core.device import Device, HostEvent
from fsdp_core.fsdp.pool import Key, make_pool

NUMEL = 64
GATHER = [Key(owner, "gather") for owner in range(4)]
GRAD = [Key(owner, "grad") for owner in range(4)]
NAMES = ["dynamic", "double", "traced"]


class SimEvent(HostEvent):
    """The work that had been issued, by stream, when the event was recorded."""

    def __init__(self, seen: dict[str, int]) -> None:
        self.seen = seen


class SimStream:
    """A stream that knows which work of which stream its next work comes after (a vector clock)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: dict[str, int] = {name: 0}

    def wait_event(self, event: SimEvent) -> None:
        for name, tick in event.seen.items():
            self.seen[name] = max(self.seen.get(name, 0), tick)

    def wait_stream(self, stream: "SimStream") -> None:
        self.wait_event(stream.record_event())

    def record_event(self) -> SimEvent:
        return SimEvent(dict(self.seen))

    def work(self) -> tuple[str, int]:
        self.seen[self.name] += 1
        return self.name, self.seen[self.name]

    def comes_after(self, work: tuple[str, int]) -> bool:
        return self.seen.get(work[0], 0) >= work[1]


class SimDevice(Device):
    """The CPU with streams that run ahead, and a caching allocator that keeps blocks by stream."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.streams = [SimStream("main"), SimStream("gather"), SimStream("reduce")]
        self.now = self.streams[0]
        self.allocated_on: list[str] = []
        self._free: dict[tuple[str, int], list[list[tuple[str, int]]]] = {}
        self._blocks: dict[int, tuple[str, int, list[tuple[str, int]]]] = {}

    def current_stream(self) -> Any:
        return self.now

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def resize_storage(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        if nbytes == 0:
            home, size, uses = self._blocks.pop(storage._cdata)
            self._free.setdefault((home, size), []).append(uses)
        super().resize_storage(storage, nbytes)
        if nbytes:
            self.allocate(storage)

    def allocate(self, storage: torch.UntypedStorage) -> None:
        """Give the storage a block of the current stream: one that was freed, if there is one."""
        place = (self.now.name, storage.nbytes())
        free = self._free.setdefault(place, [])
        self._blocks[storage._cdata] = (*place, free.pop() if free else [])
        self.allocated_on.append(self.now.name)

    def use(self, tensor: torch.Tensor, stream: SimStream) -> None:
        """A kernel on `stream` writes the tensor: every earlier use of the block must be over."""
        uses = self._blocks[tensor.untyped_storage()._cdata][2]
        late = [work for work in uses if not stream.comes_after(work)]
        assert not late, f"{stream.name} writes what {late} may still use"
        uses.append(stream.work())


class SeeAllocations(TorchDispatchMode):
    def __init__(self, device: SimDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self._device.allocate(out.untyped_storage())
        return out


@pytest.fixture
def device() -> Iterator[SimDevice]:
    device = SimDevice()
    with SeeAllocations(device):
        yield device


def take(pool: Any, key: Key, stream: SimStream) -> torch.Tensor:
    tensor: torch.Tensor = pool.acquire(key, NUMEL, torch.bfloat16, stream)
    return tensor


Move = tuple[Key, int, int, bool]
"""A key to acquire or release, the number of the stream, that of the current one, end of pass."""
MOVES = st.lists(
    st.tuples(
        st.sampled_from([*GATHER, *GRAD[:2]]), st.integers(0, 2), st.integers(0, 2), st.booleans()
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(NAMES), persistent=st.booleans(), moves=MOVES)
def test_no_two_uses_of_memory_race(name: str, persistent: bool, moves: list[Move]) -> None:
    """Whatever streams acquire, use and release, every write comes after the block's last use."""
    device = SimDevice()
    with SeeAllocations(device), torch.no_grad():
        pool = make_pool(name, device, persistent_on_miss=persistent)
        held: dict[Key, tuple[torch.Tensor, SimStream, int]] = {}
        for step, (key, number, current, ends) in enumerate(moves):
            stream = device.streams[number]
            with device.on(device.streams[current]):
                if key not in held:
                    tensor = take(pool, key, stream)
                    device.use(tensor, stream)
                    held[key] = tensor.fill_(step), stream, step
                else:
                    tensor, writer, written = held.pop(key)
                    assert bool((tensor == written).all())
                    stream.wait_stream(writer)  # the user's part: it reads what was written
                    device.use(tensor, stream)
                    pool.release(key, stream)
                if ends:
                    pool.end_of_pass()


def test_dynamic_allocates_on_the_current_stream(device: SimDevice) -> None:
    """All memory comes from the stream that is current, never from the stream it is used on."""
    pool = make_pool("dynamic", device, persistent_on_miss=True)
    _, gather, reduce = device.streams
    for _ in range(3):
        for key, stream in ((GATHER[0], gather), (GRAD[0], reduce), (GATHER[1], gather)):
            device.use(take(pool, key, stream), stream)
            pool.release(key, stream)
    with device.on(reduce):
        take(pool, GATHER[0], gather)
    assert device.allocated_on == ["main"] * 9 + ["reduce"]


@pytest.mark.parametrize("name", ["double", "traced"])
def test_a_new_slot_is_written_after_what_its_stream_did_before(
    device: SimDevice, name: str
) -> None:
    """The first user of a slot comes after the stream that its memory was allocated on."""
    pool = make_pool(name, device, persistent_on_miss=True)
    main, gather, _ = device.streams
    for key in (GATHER[0], GRAD[0]):
        take(pool, key, main)
        pool.release(key, main)
    earlier = main.work()
    pool.end_of_pass()
    if name == "double":
        take(pool, GATHER[1], gather)
    else:
        take(pool, GATHER[0], gather)
    assert gather.comes_after(earlier)


@pytest.mark.parametrize("name", ["double", "traced"])
def test_the_next_holder_waits_for_the_last_release_and_no_more(
    device: SimDevice, name: str
) -> None:
    """A slot is written after its last release; work issued since then need not be over."""
    pool = make_pool(name, device, persistent_on_miss=True)
    main, gather, _ = device.streams
    for _ in range(2):
        for key in (*GATHER[:3], GRAD[0]):
            take(pool, key, gather)
            pool.release(key, main)
        pool.end_of_pass()
    take(pool, GATHER[0], gather)
    use = main.work()
    pool.release(GATHER[0], main)
    later = main.work()
    take(pool, GATHER[2], gather)
    assert gather.comes_after(use)
    assert not gather.comes_after(later)
    pool.release(GATHER[2], main)
    pool.forget_events()
    take(pool, GATHER[0], gather)
    assert not gather.comes_after(later)
