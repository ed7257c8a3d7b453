"""The race detector: what nothing orders is found and named, and nothing else is."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from fsdp_core.device import Device
from fsdp_core.fsdp.pool import Key
from fsdp_core.stress.races import Clocks, Named, RaceFound, Races

CPU = Device("cpu")


@contextlib.contextmanager
def watching() -> Iterator[Races]:
    """The streams of the CPU keep clocks, and operators are watched."""
    races = Races()
    with CPU.modelling_streams(races.clocks), CPU.watching_storages(races), races:
        yield races


def texts(races: Races) -> list[str]:
    return [str(race) for race in races.found]


# ---- clocks


def test_work_comes_after_what_was_waited_for_and_no_more() -> None:
    """A wait orders work up to the event; what the other stream is given later stays unordered."""
    clocks = Clocks()
    one, two = clocks.new_stream("one"), clocks.new_stream("two")
    one.issue()
    event = one.record_event()
    one.issue()
    two.wait_event(event)
    assert two.comes_after(one, 1)
    assert not two.comes_after(one, 2)
    assert not one.comes_after(two, 1)


@pytest.mark.parametrize("how", ["device", "stream", "event"])
def test_what_the_host_waits_for_comes_before_all_that_follows(how: str) -> None:
    """Also before work of streams that are made later."""
    clocks = Clocks()
    one, two = clocks.new_stream("one"), clocks.new_stream("two")
    one.issue()
    waits: dict[str, Callable[[], None]] = {
        "device": clocks.synchronize,
        "stream": one.synchronize,
        "event": one.record_event().synchronize,
    }
    waits[how]()
    assert two.comes_after(one, 1)
    assert clocks.new_stream("three").comes_after(one, 1)


# ---- accesses


KINDS: dict[str, tuple[Callable[[torch.Tensor], object], Callable[[torch.Tensor], object]]] = {
    "write then read": (lambda t: t.zero_(), lambda t: t.add(1)),
    "read then write": (lambda t: t.add(1), lambda t: t.zero_()),
    "write then write": (lambda t: t.zero_(), lambda t: torch._foreach_mul_([t], 2.0)),
    "out argument": (lambda t: torch.add(torch.ones(8), 1, out=t), lambda t: t.sum()),
    "view of it": (lambda t: t.view(2, 4).t().zero_(), lambda t: t[7:].add(1)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("waits", [False, True])
def test_two_streams_race_unless_one_waits(kind: str, waits: bool) -> None:
    """Whatever way the two touch the same bytes, the missing wait is found, and only that."""
    first, second = KINDS[kind]
    with watching() as races:
        memory = torch.zeros(8)
        side, main = CPU.new_stream("side"), CPU.current_stream()
        side.wait_stream(main)
        with CPU.on(side):
            first(memory)
        if waits:
            main.wait_event(side.record_event())
        second(memory)
        CPU.synchronize()
    assert bool(races.found) == (not waits), texts(races)


def test_reads_and_other_bytes_do_not_race() -> None:
    """Two reads of the same bytes, and writes side by side in one storage, need no order."""
    with watching() as races:
        memory = torch.zeros(8)
        side = CPU.new_stream("side")
        side.wait_stream(CPU.current_stream())
        with CPU.on(side):
            memory[:4].zero_()
        memory[4:].zero_()
        CPU.synchronize()
        with CPU.on(side):
            memory.sum()
        memory.sum()
        CPU.synchronize()
    assert texts(races) == []


def test_a_covered_access_is_still_found_through_the_one_that_covers_it() -> None:
    """A third stream that waits for nobody races with the last write, though older ones went."""
    with watching() as races:
        memory = torch.zeros(8)
        one, two = CPU.new_stream("one"), CPU.new_stream("two")
        one.wait_stream(CPU.current_stream())
        for _ in range(3):
            with CPU.on(one):
                memory.add_(1)
        two.wait_event(races.clocks.streams[0].record_event())
        with CPU.on(two):
            memory.sum()
        CPU.synchronize()
    (race,) = races.found
    assert (race.earlier.stream.name, race.later.stream.name) == ("one", "two")


def test_a_read_does_not_hide_the_write_before_it() -> None:
    """A stream that reads too races with the write, not with the other's read of the same bytes."""
    with watching() as races:
        memory = torch.zeros(8)
        one = CPU.new_stream("one")
        one.wait_stream(CPU.current_stream())
        with CPU.on(one):
            memory.add_(1)
            memory.sum()
        memory.sum()
        CPU.synchronize()
    assert [race.earlier.operator for race in races.found] == ["aten::add_"]


def test_a_read_by_the_host_orders_what_follows() -> None:
    """`item` waits for its stream, so work issued after it comes after that stream's."""
    with watching() as races:
        memory = torch.zeros(8)
        side = CPU.new_stream("side")
        side.wait_stream(CPU.current_stream())
        with CPU.on(side):
            memory.fill_(2.0).sum().item()
        memory.add_(1)
    assert texts(races) == []


# ---- memory that comes and goes


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("how", ["dies", "is emptied"])
def test_memory_goes_back_to_the_stream_that_made_it(how: str, waits: bool) -> None:
    """Given back while another stream still uses it, it races with that stream's next owner."""
    with watching() as races:
        memory = torch.zeros(64)
        side, main = CPU.new_stream("side"), CPU.current_stream()
        side.wait_stream(main)
        with CPU.on(side):
            memory.add_(1)
        if waits:
            main.wait_stream(side)
        if how == "is emptied":
            CPU.resize_storage(memory.untyped_storage(), 0)
        else:
            del memory
    assert bool(races.found) == (not waits)
    assert all("reuse writes on stream default" in text for text in texts(races))


@pytest.mark.parametrize("how", ["made", "filled again"])
def test_a_block_is_for_the_stream_that_it_was_taken_on(how: str) -> None:
    """Another stream must come after what that one was given before: the block may be in use."""
    with watching() as races:
        memory = torch.empty(64)
        if how == "filled again":
            CPU.resize_storage(memory.untyped_storage(), 0)
        side = CPU.new_stream("side")
        side.wait_stream(CPU.current_stream())
        torch.ones(1).add_(1)
        if how == "filled again":
            CPU.resize_storage(memory.untyped_storage(), 256)
        else:
            memory = torch.empty(64)
        with CPU.on(side):
            memory.zero_()
        CPU.synchronize()
    assert len(races.found) == 1, texts(races)


# ---- reports


def test_a_race_names_tensor_unit_streams_and_places() -> None:
    """Of a named tensor the part that both touch; each pair of places is told once."""
    flat = torch.zeros(8)
    with watching() as races:
        races.named = lambda: (
            Named("head.weight", "root", flat[:4]), Named("head.bias", "root", flat[4:])
        )  # fmt: skip
        side = CPU.new_stream("gather")
        side.wait_stream(CPU.current_stream())
        for _ in range(2):
            with CPU.on(side):
                flat[4:].zero_()
            flat[5:6].add_(1)
        CPU.synchronize()
    assert len(races.found) == 2  # the side stream does not wait either
    with pytest.raises(RaceFound) as caught:
        races.require_none()
    first = str(caught.value).splitlines()[0]
    assert first.startswith(
        "head.bias of unit root: aten::add_ writes on stream default at test_races.py:"
    )
    assert "aten::zero_ writes on stream gather at test_races.py:" in first
    assert first.endswith("unordered (and 1 more)")
    assert len(caught.value.races) == 2
    races.require_none()  # told once


def test_buffers_of_pools_are_named_by_who_holds_them() -> None:
    """And memory that was made from one by the operator and place that made it."""
    buffer = torch.zeros(8)
    with watching() as races:
        races.label(Key(3, "grad"), buffer)
        races.units = {3: "layers.1"}
        side = CPU.new_stream("reduce")
        side.wait_stream(CPU.current_stream())
        output = torch.empty(8)
        side.wait_stream(CPU.current_stream())
        with CPU.on(side):
            output.copy_(buffer)
        buffer.zero_()
        output.add_(1)
        CPU.synchronize()
    named, made = texts(races)
    assert named.startswith("grad buffer of unit layers.1: aten::zero_ writes on stream default")
    assert made.startswith("memory made by aten::empty at test_races.py:")
    assert "for the grad buffer of unit layers.1: aten::add_ writes" in made


# ---- the device


def test_only_the_cpu_can_be_modelled_and_only_once() -> None:
    """Two models would each see half of the work."""
    with (
        watching(),
        pytest.raises(RuntimeError, match="no other model"),
        CPU.modelling_streams(Clocks()),
    ):
        pass
    assert type(CPU.new_stream("x")).__name__ == "HostStream"
