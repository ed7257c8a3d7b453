"""The bank of a stage: which memory its graphs share, and what a failed capture leaves."""

import gc
import weakref
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_core.model.batch import Capacity, Document, Part, pack, packed_part
from fsdp_core.model.decoder import DecoderStage
from fsdp_core.model.rope import RopeTable
from fsdp_core.parallel.context import DynamicContext
from fsdp_core.parallel.mesh import Axis
from fsdp_core.train import banks
from fsdp_core.train.banks import Capturing, StageBank
from fsdp_core.train.scopes import GraphCounts
from fsdp_core.train.stage_graphs import CaptureTools

LOCAL, SIZES, NUM_SLOTS = 16, (1, 4), 2


class Stage(nn.Module):
    """As much of a stage as a bank looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = RopeTable(LOCAL, 4, 100.0)


class AnyContext:
    """Groups that nobody talks over."""

    def check(self, axis: Axis) -> None:
        """Every group will do."""


@dataclass
class Captured:
    """What stands in for graphs of layers: what they were made with."""

    maker: object
    part: Part
    resolve: Any
    is_dropped: bool = False
    is_waiting: bool = False

    def reset(self) -> None:
        """Note it."""
        self.is_dropped = True


class Log:
    """Replaces graphs of layers; fails at the number `fails_at`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Captured] = []
        self.meetings: list[int] = []
        self.fails_at = -1
        monkeypatch.setattr(banks, "LayerGraphs", self._make)

    def _make(
        self, stage: object, pieces: object, maker: object, part: Part, sample: object,
        tools: CaptureTools, **names: object,
    ) -> Captured:  # fmt: skip
        if len(self.made) == self.fails_at:
            raise ValueError("no room")
        self.made.append(Captured(maker, part, tools.resolve))
        return self.made[-1]

    def meet(self) -> None:
        """How many were made before each meeting."""
        self.meetings.append(len(self.made))


def part_of(lengths: tuple[int, ...], size: int) -> Part:
    """The part of rank 0 of `size`."""
    group = dist.group.WORLD
    assert group is not None
    capacity = Capacity(tokens=LOCAL * size, slots=4, multiple=2 * size)
    documents = [Document(torch.arange(n), torch.arange(n)) for n in lengths]
    return packed_part(pack(documents, capacity), Axis("cp", size, 0, group), 1.0).part


def bank_of(log: Log, stage: Stage) -> StageBank:
    """The bank of a stage, not captured yet."""
    weight = torch.zeros(3)
    options = Capturing(
        context=cast("DynamicContext", AnyContext()),
        samples={size: part_of((5, 6), size) for size in SIZES},
        sample=torch.zeros(1),
        tools=CaptureTools(resolve=lambda: {"weight": weight}, counts=GraphCounts()),
        new_maker=cast("Any", object),
        num_slots=NUM_SLOTS,
        between=log.meet,
    )
    return StageBank(cast("DecoderStage", stage), (), options)


def test_sizes_share_memory_and_slots_do_not(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Largest size first, slot by slot; a slot has one maker for all sizes, another slot another.

    Two slots are between forward and backward at once and may hold any two sizes: one memory for
    both would be overwritten. A slot holds one microbatch, so its sizes may share.
    """
    assert mesh.size() == 1
    log = Log(monkeypatch)
    bank_of(log, Stage()).capture()
    assert [each.part.cp.size for each in log.made] == [4, 4, 1, 1]
    assert log.meetings == [0, 2]
    first, second, *others = (each.maker for each in log.made)
    assert first is not second
    assert others == [first, second]
    # Each reads metadata of its own.
    assert len({each.part.plan.positions.data_ptr() for each in log.made}) == 4


def test_a_microbatch_goes_to_its_size_and_slot(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its metadata are where these graphs read them, and no other's are touched."""
    assert mesh.size() == 1
    log = Log(monkeypatch)
    bank = bank_of(log, Stage())
    with pytest.raises(RuntimeError, match="captured graphs for context size 4, got none"):
        bank.choose(part_of((16,), 4), 1)
    bank.capture()
    before = [each.part.plan.positions.clone() for each in log.made]
    part = part_of((3, 3, 3), 4)
    assert cast("Any", bank.choose(part, 1)) is log.made[1]
    for index, (each, old) in enumerate(zip(log.made, before, strict=True)):
        now = each.part.plan.positions
        assert torch.equal(now, part.plan.positions if index == 1 else old)
    with pytest.raises(ValueError, match="got one in slot 2"):
        bank.choose(part, 2)


def test_a_slot_is_refused_while_any_size_of_it_waits(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes share a slot's memory: none is replayed between forward and backward of another."""
    assert mesh.size() == 1
    log = Log(monkeypatch)
    bank = bank_of(log, Stage())
    bank.capture()
    log.made[0].is_waiting = True  # size 4 in slot 0
    before = [each.part.plan.positions.clone() for each in log.made]
    for size in SIZES:
        with pytest.raises(RuntimeError, match="Expected slot 0 to be free"):
            bank.choose(part_of((3, 3, 3), size), 0)
    for each, old in zip(log.made, before, strict=True):
        assert torch.equal(each.part.plan.positions, old)
    assert cast("Any", bank.choose(part_of((3,), 1), 1)) is log.made[3]
    log.made[0].is_waiting = False
    assert cast("Any", bank.choose(part_of((3,), 1), 0)) is log.made[2]


def test_ledgers_know_the_metadata(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """What graphs read of microbatches has names, beside what the trainer names."""
    assert mesh.size() == 1
    log = Log(monkeypatch)
    bank_of(log, Stage()).capture()
    for each in log.made:
        named = each.resolve()
        assert named["weight"].shape == (3,)
        known = {tensor.data_ptr() for tensor in named.values()}
        plan, packed = each.part.plan, each.part.packed
        assert packed is not None
        for tensor in (plan.rows, plan.positions, plan.valid, plan.spans.offsets, *packed):
            assert tensor is not None
            assert tensor.data_ptr() in known


@pytest.mark.parametrize("fails_at", range(4))
def test_a_failed_capture_leaves_nothing(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """All graphs of all sizes and slots are dropped, tables are let go, and a retry works."""
    assert mesh.size() == 1
    log, stage = Log(monkeypatch), Stage()
    log.fails_at = fails_at
    bank = bank_of(log, stage)
    with pytest.raises(ValueError, match="no room"):
        bank.capture()
    assert [each.is_dropped for each in log.made] == [True] * fails_at
    assert bank.graphs == []
    table = weakref.ref(stage.rope.cos)
    stage.rope.to("meta")
    gc.collect()
    assert table() is None
    log.fails_at = -1
    bank.capture()
    assert len(bank.graphs) == 4


def test_tables_are_kept_until_the_reset(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that the model replaces is there while graphs may read it, and no longer."""
    assert mesh.size() == 1
    log, stage = Log(monkeypatch), Stage()
    bank = bank_of(log, stage)
    bank.capture()
    table = weakref.ref(stage.rope.cos)
    stage.rope.to("meta")
    gc.collect()
    assert table() is not None
    bank.reset()
    gc.collect()
    assert table() is None
    assert all(each.is_dropped for each in log.made)
