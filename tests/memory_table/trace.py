"""Follows every allocation of a device, for `allocations` to say whose they were.

    CPU     storages that operators make, as `StorageCounter` sees them; stacks are read at once
    CUDA    the caching allocator's own history (`torch.cuda.memory._snapshot`), with its stacks;
            segments tell what graphs' private pools hold

Reading stacks costs some microseconds an allocation: for a run that is looked into, not for one
that is timed.
"""

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fsdp_core.device import Device
from fsdp_core.memory_counter import StorageCounter
from tests.memory_table.allocations import Explanation, Ledger, explain

MAX_EVENTS = 4_000_000
"""Of CUDA's history; some hundred bytes each, on the host. A longer one has lost its beginning."""
_ROUND = 512
"""The caching allocator gives out whole multiples of so many bytes."""
_COUNTING = ("fsdp_core/device.py", "fsdp_core/memory_counter.py")
BEFORE = "before the trace"
"""Where memory comes from that was in use when the history began; it has no other owner."""
ROOT = f"{Path(__file__).parents[2]}/"
_OURS = ("fsdp_core/", "harness/")
_SHORT: dict[str, str] = {}


class TracedCounter(StorageCounter):
    """Counts as `StorageCounter` does, and writes it all into a ledger."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()

    def _change(self, key: int, delta: int) -> None:
        super()._change(key, delta)
        known = self._known.get(key)
        if known is None:
            self.ledger.freed(key)
        elif self.ledger.holds(key):
            self.ledger.resized(key, known[1])
        else:
            self.ledger.made(key, known[1], _places_here())


class MemoryTrace:
    """What happened to a device's memory inside `tracing`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._counter = None if device.is_cuda else TracedCounter()
        self._before: Mapping[int, int] = {}

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Count the device's memory inside, as `Device.counting_memory`, and follow it."""
        if not self._device.is_cuda:
            with self._device.counting_memory(self._counter):
                yield
            return
        history: Any = torch.cuda.memory._record_memory_history
        self._before = blocks_of(self._snapshot(), self._index)
        history("all", context="alloc", stacks="python", max_entries=MAX_EVENTS, clear_history=True)
        try:
            with self._device.counting_memory():
                yield
        finally:
            history(None)

    def explain(self, named: Iterable[tuple[str, torch.Tensor]]) -> Explanation:
        """Whose memory the peak was. Call it inside `tracing`.

        Args:
            named: owner and tensor, of what objects hold now.
        """
        owners = {key_of(tensor): owner for owner, tensor in named}
        if self._counter is not None:
            self._counter.settle()
            return explain(self._counter.ledger, owners, self._counter.peak_bytes)
        self._device.synchronize()
        ledger = ledger_of(self._snapshot(), self._index, self._before)
        return explain(ledger, owners, self._device.peak_bytes())

    def graph_pool_bytes(self) -> int:
        """What private pools of graphs have from the driver, used or not; on the CPU 0."""
        if self._counter is not None:
            return 0
        segments = self._snapshot()["segments"]
        return sum(
            each["total_size"]
            for each in segments
            if each["device"] == self._index and tuple(each["segment_pool_id"]) != (0, 0)
        )

    def _snapshot(self) -> Mapping[str, Any]:
        snapshot: Mapping[str, Any] = torch.cuda.memory._snapshot()
        return snapshot

    @property
    def _index(self) -> int:
        return self._device.torch_device.index or 0


def key_of(tensor: torch.Tensor) -> int:
    """What a tensor's memory is known by: its block's address on CUDA, its storage on the CPU."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() if tensor.is_cuda else storage._cdata


def blocks_of(snapshot: Mapping[str, Any], device: int) -> dict[int, int]:
    """Address and bytes of each block that is in use on one device."""
    return {
        block["address"]: block["size"]
        for segment in snapshot["segments"]
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def ledger_of(
    snapshot: Mapping[str, Any], device: int, before: Mapping[int, int] | None = None
) -> Ledger:
    """The allocator's history of one device, as a ledger of what was given out.

    Args:
        snapshot: of `torch.cuda.memory._snapshot`; only `device_traces` and `segments` are read.
        device: its index.
        before: address and bytes of what was in use when the history began; the peak counts it.

    Raises:
        RuntimeError: the history is full, so its beginning is lost.
    """
    events = snapshot["device_traces"][device]
    if len(events) >= MAX_EVENTS:
        raise RuntimeError(f"Expected at most {MAX_EVENTS} events of memory, the history is full.")
    sizes = blocks_of(snapshot, device)
    ledger, last = Ledger(), dict[int, int]()
    for address, nbytes in (before or {}).items():
        ledger.made(address, nbytes, (BEFORE,))
    for number, event in enumerate(events):
        if event["action"] == "alloc":
            last[event["addr"]] = number
    for number, event in enumerate(events):
        address = event["addr"]
        if event["action"] == "alloc":
            # What is still there says how large its block is; of what is gone only the request
            # is known, which the allocator rounded up.
            nbytes = -(-event["size"] // _ROUND) * _ROUND
            if last[address] == number:
                nbytes = sizes.get(address, nbytes)
            ledger.made(address, nbytes, _places_of(event.get("frames", ())))
        elif event["action"] == "free_completed":
            ledger.freed(address)
    return ledger


def _places_of(frames: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(
        f"{short}:{frame['name']}" for frame in frames if (short := _short(frame["filename"]))
    )


def _places_here() -> tuple[str, ...]:
    """Files and functions of ours on this thread's stack, innermost first, without the counter."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        short = _short(code.co_filename)
        if short and short not in _COUNTING:
            found.append(f"{short}:{code.co_name}")
        frame = frame.f_back
    return tuple(found)


def _short(filename: str) -> str:
    """The path from one of our packages on; "" for other files."""
    short = _SHORT.get(filename)
    if short is None:
        inside = filename.removeprefix(ROOT)
        short = _SHORT[filename] = inside if inside.startswith(_OURS) else ""
    return short
