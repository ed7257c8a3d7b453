"""Graphs by context size and slot: which memory they share, and what a failed capture leaves."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.graph.recorder import AddressBook
from fsdp_core.model.batch import Capacity, Document, Part, pack, packed_part
from fsdp_core.model.layers import RopeTable
from fsdp_core.parallel.context import DynamicContext
from fsdp_core.parallel.mesh import Axis
from fsdp_core.train import graphs
from fsdp_core.train.graphs import StageGraphs
from fsdp_core.train.inputs import StaticPart, _leaves_of

LOCAL, SIZES, NUM_SLOTS = 16, (1, 4), 2
pytestmark = pytest.mark.usefixtures("mesh")


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rope = RopeTable(LOCAL, 4, 100.0)
        self.on_microbatch: Any = None


@dataclass
class Captured:
    """What stands in for the graphs of a slot: what they were made with."""

    maker: Any
    part: Part
    resolve: Any
    is_dropped: bool = False
    is_waiting: bool = False

    @property
    def graph(self) -> "Captured":
        return self

    def reset(self) -> None:
        self.is_dropped = True


class Log:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Captured] = []
        self.meetings: list[int] = []
        self.fails_at = -1
        log = self

        class Capture:
            def __init__(
                self, owner: object, stage: object, regions: object, attempt: object,
                maker: object, part: Part, sample: object, resolve: Any, suffix: str,
            ) -> None:  # fmt: skip
                self.captured = Captured(maker, part, resolve)
                self.found: dict[str, Captured] = {}

            def run(self) -> None:
                if len(log.made) == log.fails_at:
                    raise ValueError("no room")
                log.made.append(self.captured)
                self.found["region"] = self.captured

        monkeypatch.setattr(graphs, "SlotCapture", Capture)

    def meet(self) -> None:
        self.meetings.append(len(self.made))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    return Log(monkeypatch)


class Maker:
    pool = None


class AnyContext:
    def check(self, axis: Axis) -> None:
        """Every group will do."""


def part_of(lengths: tuple[int, ...], size: int) -> Part:
    group = dist.group.WORLD
    assert group is not None
    capacity = Capacity(tokens=LOCAL * size, slots=4, multiple=2 * size)
    documents = [Document(torch.arange(n), torch.arange(n)) for n in lengths]
    return packed_part(pack(documents, capacity), Axis("cp", size, 0, group), 1.0).part


class Owner(SimpleNamespace):
    """In place of all graphs of a rank."""

    @property
    def book(self) -> AddressBook:
        book = AddressBook()
        book.hold("weight", self.weight)
        return book


def graphs_of(log: Log, stage: Stage) -> StageGraphs:
    owner = Owner(new_maker=Maker, weight=torch.zeros(3), meet=log.meet)
    return StageGraphs(
        cast("Any", owner), cast("Any", stage), (), {s: part_of((5, 6), s) for s in SIZES},
        attempt=lambda capture: capture(), num_slots=NUM_SLOTS,
        context=cast("DynamicContext", AnyContext()),
    )  # fmt: skip


def captured(log: Log) -> StageGraphs:
    made = graphs_of(log, Stage())
    made.capture(torch.zeros(1))
    return made


def test_sizes_share_memory_and_slots_do_not(log: Log) -> None:
    """Largest size first, slot by slot; a slot has one maker for all sizes."""
    captured(log)
    assert [each.part.cp.size for each in log.made] == [4, 4, 1, 1]
    assert log.meetings == [0, 2]
    first, second, *others = (each.maker for each in log.made)
    assert first is not second
    assert others == [first, second]
    # Each reads metadata of its own.
    assert len({each.part.plan.positions.data_ptr() for each in log.made}) == 4


def test_a_microbatch_goes_to_its_size_and_slot(log: Log) -> None:
    """Its metadata are where these graphs read them, and no other's are touched."""
    made = captured(log)
    before = [each.part.plan.positions.clone() for each in log.made]
    part = part_of((3, 3, 3), 4)
    assert cast("Any", made.choose(part, 1)) == {"region": log.made[1]}
    for index, (each, old) in enumerate(zip(log.made, before, strict=True)):
        now = each.part.plan.positions
        assert torch.equal(now, part.plan.positions if index == 1 else old)


def test_a_slot_is_refused_while_any_size_of_it_waits(log: Log) -> None:
    """Sizes share a slot's memory: none is replayed between forward and backward of another."""
    made = captured(log)
    log.made[0].is_waiting = True  # size 4 in slot 0
    before = [each.part.plan.positions.clone() for each in log.made]
    for size in SIZES:
        with pytest.raises(AssertionError, match="slot 0 still awaits its backward"):
            made.choose(part_of((3, 3, 3), size), 0)
    for each, old in zip(log.made, before, strict=True):
        assert torch.equal(each.part.plan.positions, old)
    assert cast("Any", made.choose(part_of((3,), 1), 1)) == {"region": log.made[3]}
    log.made[0].is_waiting = False
    assert cast("Any", made.choose(part_of((3,), 1), 0)) == {"region": log.made[2]}


def test_ledgers_know_the_metadata(log: Log) -> None:
    """What graphs read of microbatches has names, beside what the trainer names."""
    captured(log)
    for each in log.made:
        named = each.resolve()
        assert named["weight"].shape == (3,)
        known = {tensor.data_ptr() for tensor in named.values()}
        plan, packed = each.part.plan, each.part.packed
        assert packed is not None
        for tensor in (plan.rows, plan.positions, plan.valid, plan.spans.offsets, *packed):
            assert tensor is not None
            assert tensor.data_ptr() in known


def test_a_group_made_again_is_refused(log: Log) -> None:
    """Graphs hold a communicator; another one of the same ranks would never meet it."""
    context = DynamicContext([[0]], (1,))
    axis = context.axis(1)
    made = graphs_of(log, Stage())
    made._context = context
    made._samples = {1: replace(part_of((3,), 1), cp=axis)}
    made.capture(torch.zeros(1))
    again = dist.new_group([0])
    assert isinstance(again, dist.ProcessGroup)
    other = replace(part_of((3,), 1), cp=replace(axis, group=again))
    with pytest.raises(AssertionError, match="kept for context size 1"):
        made.choose(other, 0)
    made.reset()
    made._samples = {1: other}
    with pytest.raises(AssertionError, match="kept for context size 1"):
        made.capture(torch.zeros(1))


# --- static parts: metadata are copied to where graphs read them, or the microbatch is refused ----


LOCAL_TOKENS = 16


def axis_of(size: int, rank: int = 0) -> Axis:
    group = dist.group.WORLD
    assert group is not None
    return Axis("cp", size, rank, group)


def static_part_of(
    lengths: tuple[int, ...], axis: Axis, *, slots: int = 5, local: int = LOCAL_TOKENS
) -> Part:
    capacity = Capacity(tokens=local * axis.size, slots=slots, multiple=2 * axis.size)
    documents = [Document(torch.arange(n), torch.arange(n)) for n in lengths]
    return packed_part(pack(documents, capacity), axis, 1.0).part


def tensors_of(part: Part) -> dict[str, torch.Tensor]:
    return {name.partition(": ")[2]: t for name, t in StaticPart(part, "x").named_tensors()}


@pytest.mark.parametrize("size", [1, 4])
def test_follows_every_tensor_and_moves_none(size: int) -> None:
    """After it everything is as in the microbatch, at the addresses of before."""
    axis = axis_of(size, size // 2)
    static = StaticPart(static_part_of((3, 8), axis), "static")
    named = dict(static.named_tensors())
    before = {name: t.data_ptr() for name, t in named.items()}
    assert len(set(before.values())) == len(before) >= (7 if size == 1 else 11)
    for lengths in ((1, 1, 2, 7), (), (16,)):
        part = static_part_of(lengths, axis)
        expected = tensors_of(part)
        static.follow(part)
        assert tensors_of(static.part).keys() == expected.keys()
        for name, tensor in static.named_tensors():
            assert torch.equal(tensor, expected[name.partition(": ")[2]]), name
        assert {name: t.data_ptr() for name, t in static.named_tensors()} == before


def test_keeps_nothing_of_its_sample() -> None:
    """The sample may change or go, and slots made of one sample have nothing in common."""
    sample = static_part_of((3, 8), axis_of(1))
    static = StaticPart(sample, "static")
    lent = {t.data_ptr() for _, t in _leaves_of(sample) if isinstance(t, torch.Tensor)}
    assert len(lent) > 5
    for name, tensor in static.named_tensors():
        assert tensor.data_ptr() not in lent, name
    sample.plan.positions.fill_(-1)
    assert static.part.plan.positions.min() == 0
    assert static.part.cp is sample.cp


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"slots": 6}, r"plan.spans.offsets = .*\[8\]\).*captured as .*\[7\]\)"),
    ({"local": 24}, r"plan.rows = .*\[24\]\).*captured as .*\[16\]\)"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=["slots", "tokens"])
def test_refuses_what_graphs_cannot_hold(change: dict[str, Any], message: str) -> None:
    """Another capacity is an error, and what graphs read stays as it was."""
    axis = axis_of(4, 1)
    static = StaticPart(static_part_of((3, 8), axis), "static")
    before = {name: t.clone() for name, t in static.named_tensors()}
    with pytest.raises(AssertionError, match=message):
        static.follow(static_part_of((9,), axis, **change))
    for name, tensor in static.named_tensors():
        assert torch.equal(tensor, before[name])


def test_refuses_another_place() -> None:
    """The rank, the size and the communicator were fixed by the capture."""
    static = StaticPart(static_part_of((3, 8), axis_of(4, 1)), "static")
    with pytest.raises(AssertionError, match=r"plan.rank = 2, captured as 1"):
        static.follow(static_part_of((3, 8), axis_of(4, 2)))
    other = dist.new_group([0])
    assert isinstance(other, dist.ProcessGroup)
    with pytest.raises(AssertionError, match="context group"):
        static.follow(static_part_of((3, 8), Axis("cp", 4, 1, other)))
