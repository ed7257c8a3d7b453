"""The host graph's contract: what a replay reads, what it keeps, what it refuses, its memory."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_core.device import Device
from fsdp_core.graph.host_graph import HostGraph, plan_arena
from fsdp_core.graph.ledger import Ledger, StaleAddress
from fsdp_core.graph.recorder import CaptureRefused


def test_inputs_are_read_anew() -> None:
    """A replay uses what is in the static inputs now."""
    x = torch.zeros(3)
    graph = HostGraph(Device("cpu"))
    result = graph.capture(lambda: x * 2)
    for value in (5.0, -1.0):
        x.fill_(value)
        graph.replay()
        assert (result == 2 * value).all()


def test_no_python_runs_in_a_replay() -> None:
    """The program's Python runs once, at the capture; a flag frozen then stays frozen."""
    x, calls = torch.ones(3), []

    def function() -> torch.Tensor:
        calls.append(1)
        return x + len(calls)

    graph = HostGraph(Device("cpu"))
    result = graph.capture(function)
    graph.replay()
    graph.replay()
    assert calls == [1]
    assert (result == 2).all()


def test_outputs_keep_their_values_until_the_next_replay() -> None:
    """What escapes has its own memory: other allocations and eager work do not touch it."""
    x = torch.ones(64)
    graph = HostGraph(Device("cpu"))
    first, second = graph.capture(lambda: (x + 1, (x * 3).tanh() * 2))
    graph.replay()
    held = [first.tolist(), second.tolist()]
    noise = [torch.full((64,), float("nan")) for _ in range(50)]
    x.zero_()
    assert [first.tolist(), second.tolist()] == held
    del noise
    graph.replay()
    assert [first.tolist(), second.tolist()] != held


def test_a_view_that_escapes_keeps_its_storage() -> None:
    """Returning a view of an intermediate keeps the whole intermediate right."""
    x = torch.ones(8, 8)
    graph = HostGraph(Device("cpu"))
    corner = graph.capture(lambda: (x * 2)[6:, 6:])
    x.fill_(4)
    graph.replay()
    assert (corner == 8).all()


def test_two_graphs_share_tensors() -> None:
    """A graph sees what another one wrote, in whatever order they are replayed."""
    device, x = Device("cpu"), torch.ones(4)
    add, double = HostGraph(device), HostGraph(device)
    add.capture(lambda: x.add_(1))
    product = double.capture(lambda: x * 2)
    consumer = HostGraph(device)
    total = consumer.capture(lambda: product.sum())
    add.replay()
    double.replay()
    consumer.replay()
    assert total.item() == 16
    add.replay()
    add.replay()
    double.replay()
    assert total.item() == 16
    consumer.replay()
    assert total.item() == 32


@pytest.mark.parametrize("how", ["moved", "shrunk", "freed"])
def test_replay_over_moved_memory_is_refused(how: str) -> None:
    """When an external storage moved, shrank or was freed, the replay does not run at all."""
    device = Device("cpu")
    x, y = torch.ones(1 << 16), torch.zeros(4)
    graph = HostGraph(device)
    graph.capture(lambda: y.add_(x.sum()))
    storage = x.untyped_storage()
    nbytes = storage.nbytes()
    # Growing allocates before it frees: the one way to move a storage for certain.
    device.resize_storage(storage, {"moved": 2 * nbytes, "shrunk": nbytes // 2, "freed": 0}[how])
    with pytest.raises(RuntimeError, match=f"illegal memory access: the storage of {nbytes} bytes"):
        graph.replay()
    assert (y == 0).all()


@pytest.mark.parametrize("view", [torch.real, torch.conj], ids=["plain", "conj"])
def test_a_graph_keeps_no_external_storage(view: Callable[[Any], Any]) -> None:
    """What the program has dropped since the capture is freed, and missed by ledger and replay.

    A lazily conjugated view keeps it no more than a plain one.
    """
    dropped = [torch.ones(1 << 9, dtype=torch.complex64)]
    kept, out = torch.ones(4), torch.zeros(4)
    graph = HostGraph(Device("cpu"))
    graph.capture(lambda: out.add_(kept).add_(2 * view(dropped[0]).sum().real))
    ledger = Ledger(graph.recording, lambda: {"kept": kept, "out": out})
    ledger.check()
    graph.replay()
    assert (out == 1 + 1024).all()
    dropped.clear()
    with pytest.raises(StaleAddress, match="freed since the capture"):
        ledger.check()
    with pytest.raises(RuntimeError, match="illegal memory access: the storage of 4096 bytes"):
        graph.replay()
    assert (out == 1 + 1024).all()


def test_a_storage_freed_inside_is_refused() -> None:
    """Reading a storage from before the capture and freeing it inside cannot be replayed."""
    device, x = Device("cpu"), torch.ones(1 << 12)

    def function() -> torch.Tensor:
        x.add_(1)
        total = x.sum()
        device.resize_storage(x.untyped_storage(), 0)
        return total

    with pytest.raises(CaptureRefused, match="made before the capture and is freed inside it"):
        HostGraph(device).capture(function)
    assert torch.equal(x, torch.ones(1 << 12))


def test_empty_graph_does_not_replay() -> None:
    """Neither a graph without a capture, nor one that was reset, nor an empty one replays."""
    graph = HostGraph(Device("cpu"))
    with pytest.raises(RuntimeError, match="got an empty one"):
        graph.replay()
    x = torch.ones(2)
    graph.capture(lambda: x.add_(1))
    graph.reset()
    with pytest.raises(RuntimeError, match="got an empty one"):
        graph.replay()
    graph.capture(lambda: None)
    with pytest.raises(RuntimeError, match="got an empty one"):
        graph.replay()


def test_capture_restores_the_collector() -> None:
    """The garbage collector is off during a capture and as before after it."""
    x = torch.ones(2)
    inside, _ = HostGraph(Device("cpu")).capture(lambda: (gc.isenabled(), x + 1))
    assert not inside
    assert gc.isenabled()


def test_arena_is_no_larger_than_the_peak_of_live_temporaries() -> None:
    """A chain of equal temporaries replays in the memory that eager needs at its peak."""
    x, nbytes = torch.ones(1024), 4096
    device = Device("cpu")

    def chain() -> torch.Tensor:
        h = x
        for _ in range(20):
            h = h * 1.5 + 1
        return h.sum()

    with device.counting_memory():
        chain()
        peak = device.peak_bytes()
    # One value, its product, and their sum before it replaces the value.
    assert peak == 3 * nbytes
    graph = HostGraph(device)
    graph.capture(chain)
    assert graph._arena is not None
    assert graph._arena.numel() <= peak


ranges = st.lists(
    st.tuples(st.integers(0, 500), st.integers(0, 20), st.integers(0, 20)).map(
        lambda r: (r[0], min(r[1:]), max(r[1:]))
    ),
    max_size=25,
)


@given(ranges)
@settings(max_examples=200, deadline=None)
def test_arena_plan(buffers: list[tuple[int, int, int]]) -> None:
    """Buffers alive together never overlap, all are aligned and inside, and reuse happens."""
    offsets, total = plan_arena(buffers)
    assert len(offsets) == len(buffers)
    for i, (nbytes, first, last) in enumerate(buffers):
        assert offsets[i] % 64 == 0
        assert 0 <= offsets[i] <= total - nbytes
        for j in range(i):
            other_bytes, other_first, other_last = buffers[j]
            if first <= other_last and other_first <= last and nbytes and other_bytes:
                apart = offsets[i] + nbytes <= offsets[j] or offsets[j] + other_bytes <= offsets[i]
                assert apart, (i, j)
    padded = [-(-nbytes // 64) * 64 for nbytes, _, _ in buffers]
    assert total <= sum(padded)
    if buffers:
        assert total >= max(nbytes for nbytes, _, _ in buffers)


def test_arena_reuses_memory_of_the_dead() -> None:
    """Buffers that follow each other in time share one place."""
    offsets, total = plan_arena([(100, 0, 1), (100, 2, 3), (100, 4, 5)])
    assert offsets == [0, 0, 0]
    assert total == 100
    assert plan_arena([]) == ([], 0)
