"""Contracts of tests.memory_table.trace: storages of the CPU, and histories as CUDA writes them."""

from typing import Any

import pytest
import torch

from fsdp_core.device import Device
from tests.memory_table import trace
from tests.memory_table.allocations import explain
from tests.memory_table.trace import MemoryTrace, ledger_of


def test_cpu_storages_are_followed_to_the_byte() -> None:
    """The peak is the counter's; what is kept is its holder's, what is gone the code's."""
    device = Device("cpu")
    trace = MemoryTrace(device)
    with trace.tracing():
        kept = torch.zeros(1000)
        gone = torch.zeros(500)
        device.resize_storage(gone.untyped_storage(), 8000)
        peak = device.peak_bytes()
        del gone
        found = trace.explain([("parameters", kept)])
    assert peak == found.peak_bytes == 12_000
    assert found.owners["parameters"] == 4000
    assert found.owners["activations"] == 8000  # no place of ours on the stack of a test
    assert found.unexplained_bytes == 0


def event(action: str, address: int, size: int, *places: str) -> dict[str, Any]:
    """An entry of the allocator's history."""
    frames = [{"filename": f"{trace.ROOT}{file}", "name": name, "line": 1}
              for file, _, name in (place.partition(":") for place in places)]  # fmt: skip
    return {"action": action, "addr": address, "size": size, "frames": frames}


def snapshot(*events: dict[str, Any], blocks: dict[int, int]) -> dict[str, Any]:
    """A snapshot of a device 1 with one segment."""
    held = [{"address": a, "size": s, "state": "active_allocated"} for a, s in blocks.items()]
    return {"device_traces": [[], list(events)], "segments": [{"device": 1, "blocks": held}]}


def test_history_of_cuda_is_read_as_the_allocator_counts() -> None:
    """Requests are rounded up; what is still there has its block's size; reuse is another one."""
    gather = ("../torch/nn.py:call", "fsdp_core/fsdp/pool.py:acquire",
              "fsdp_core/fsdp/param_group.py:unshard")  # fmt: skip
    ledger = ledger_of(
        snapshot(
            event("segment_alloc", 4096, 2 << 20),
            event("alloc", 4096, 1000, "fsdp_core/optim.py:step"),
            event("alloc", 8192, 100, *gather),
            event("free_requested", 8192, 100),
            event("free_completed", 8192, 100),
            event("alloc", 8192, 5000, "fsdp_core/model/attention.py:forward"),
            blocks={4096: 1024, 8192: 6000},
        ),
        1,
    )
    assert ledger.peak_bytes == 1024 + 6000
    owners = {key: (each.owner, each.nbytes) for key, each in ledger.at_peak().items()}
    assert owners == {4096: ("optimizer", 1024), 8192: ("activations", 6000)}


def test_memory_of_cuda_that_is_gone_counts_while_it_was_there() -> None:
    """Requests rounded up to blocks, until the allocator has the block back."""
    ledger = ledger_of(
        snapshot(
            event("alloc", 4096, 1000, "fsdp_core/optim.py:step"),
            event("free_requested", 4096, 1000),
            event("alloc", 8192, 100, "fsdp_core/data.py:fill"),
            event("free_completed", 4096, 1000),
            event("alloc", 9216, 500, "fsdp_core/data.py:fill"),
            blocks={},
        ),
        1,
    )
    assert (ledger.peak_bytes, ledger.live_bytes) == (1024 + 512, 512 + 512)


def test_memory_from_before_the_history_counts_until_it_is_freed() -> None:
    """A peak includes what others held; it has no owner, and says where it comes from."""
    events = [
        event("alloc", 8192, 512, "fsdp_core/data.py:fill"),
        event("free_completed", 4096, 2048),
        event("alloc", 4096, 512, "fsdp_core/data.py:fill"),
    ]
    ledger = ledger_of(snapshot(*events, blocks={}), 1, {4096: 2048})
    assert (ledger.peak_bytes, ledger.live_bytes) == (2048 + 512, 2 * 512)
    found = explain(ledger, {}, 2048 + 512)
    assert (found.owners["rest"], found.owners["data"]) == (2048, 512)
    assert found.largest_rest == (("before the trace", 2048),)


def test_a_full_history_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A history that has lost its beginning would explain another peak."""
    monkeypatch.setattr(trace, "MAX_EVENTS", 1)
    with pytest.raises(RuntimeError, match="history is full"):
        ledger_of(snapshot(event("alloc", 1, 1), blocks={}), 1)
