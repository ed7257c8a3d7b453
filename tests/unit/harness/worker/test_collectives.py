"""Whose a collective is: asked in eager steps, learned for replays, never guessed."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

from fsdp_core.device import Device, StorageCounter
from harness.engine.collective_log import IN_CAPTURE, Place, PlaceFile, place_path
from harness.engine.evidence import last_module, last_place
from harness.given import GIVEN, GivenCall, given_in
from harness.records import EventRecord, RankRecords
from harness.worker import collectives
from harness.worker.collectives import Notes, noted

GATHER, REDUCE, WAIT = (
    SimpleNamespace(_schema=SimpleNamespace(name=name))
    for name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_", collectives._WAIT)
)
SEND = SimpleNamespace(_schema=SimpleNamespace(name="c10d::send"))


class Rank:
    """Runs collectives of (0, 1) as a rank would, with `unit` at work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step, self.unit, self.captures = 0, "", False
        self.places: list[Place] = []
        self.notes = Notes(self, lambda: self.step, eager_steps=2)  # type: ignore[arg-type]
        monkeypatch.setattr(collectives, "_unit_at_work", lambda: (self.unit, self.captures))
        monkeypatch.setattr(self.notes, "_group", lambda args: (0, 1))

    def write(self, place: Place) -> None:
        self.places.append(place)

    def take(self, step: int, *calls: tuple[Any, str]) -> list[str]:
        """Labels of the collectives of a step."""
        self.step, labels = step, []
        for func, self.unit in calls:
            self.notes.entering(func, ())
            labels.append(self.places[-1].label)
            self.notes.left()
        return labels


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


def test_a_replay_has_the_labels_of_the_last_eager_step(rank: Rank) -> None:
    """Not those of the first one, which does more, nor those of the step that captures."""
    rank.take(0, (GATHER, "once"), (GATHER, "root"), (GATHER, "layers.0"), (REDUCE, "layers.0"))
    rank.take(1, (GATHER, "root"), (GATHER, "layers.0"), (REDUCE, "layers.0"))
    captured = rank.take(2, (GATHER, ""), (GATHER, "root"), (GATHER, "layers.0"))
    assert captured[1:] == ["root", "layers.0"]
    assert rank.take(3, (GATHER, ""), (GATHER, ""), (REDUCE, ""), (REDUCE, "")) == [
        "root", "layers.0", "layers.0", "",
    ]  # fmt: skip


def test_another_order_has_no_labels(rank: Rank) -> None:
    """From the first operator on that is not the learned one; the next step is looked at anew."""
    rank.take(1, (GATHER, "root"), (REDUCE, "layers.0"), (GATHER, "layers.1"))
    assert rank.take(3, (GATHER, ""), (GATHER, ""), (GATHER, "")) == ["root", "", ""]
    assert rank.take(4, (GATHER, ""), (REDUCE, "")) == ["root", "layers.0"]


def test_what_is_entered_is_counted_and_what_came_back_is_not_inside(rank: Rank) -> None:
    """Waiting for a result is inside of the collective that gives it; messages do not count."""
    rank.take(0, (GATHER, "root"), (SEND, ""))
    rank.step = 1
    rank.notes.entering(REDUCE, ())
    rank.notes.left()
    rank.notes.entering(WAIT, ())
    seen = [(p.operator.partition("::")[2], p.is_inside, p.entered["0,1"]) for p in rank.places]
    assert seen == [
        ("_allgather_base_", True, 1), ("_allgather_base_", False, 1),
        ("send", False, 1), ("send", False, 1),
        ("_reduce_scatter_base_", True, 2), ("_reduce_scatter_base_", False, 2),
        ("_reduce_scatter_base_", True, 2),
    ]  # fmt: skip


def test_collectives_of_a_capture_say_so_and_move_no_label(rank: Rank) -> None:
    """Those that belong to no unit are named after the capture; later ones keep their places."""
    rank.take(1, (GATHER, "root"), (REDUCE, "layers.0"))
    rank.captures = True
    assert rank.take(2, (GATHER, ""), (GATHER, "layers.1")) == [IN_CAPTURE, "layers.1"]
    assert rank.places[-4].collective == "allgather_base in a capture"
    rank.captures = False
    assert rank.take(2, (GATHER, ""), (REDUCE, "")) == ["root", "layers.0"]


class _Attention(nn.Module):
    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.norm, self.rank = nn.Identity(), rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = [self.rank.places[-1].module]
        x = self.norm(x)
        assert [*seen, self.rank.places[-1].module] == ["attn", "attn"]
        return x


def test_modules_are_noted_while_they_run(rank: Rank) -> None:
    """The innermost one, and the one around it once it is through; no trace is left of it."""
    attention: Any = _Attention(rank)
    attention.norm._call_impl = own = attention.norm._call_impl
    with rank.notes.modules([nn.ModuleDict({"attn": attention})]):
        attention(torch.ones(1))
    assert [place.module for place in rank.places] == ["attn", "attn.norm", "attn", ""]
    num_places = len(rank.places)
    attention.norm(torch.ones(1))
    assert len(rank.places) == num_places
    assert "_call_impl" not in vars(attention)
    assert vars(attention.norm)["_call_impl"] is own


def test_a_rank_that_dies_leaves_the_module_behind(tmp_path: Path) -> None:
    """What it was in when it stopped can be read from its file, and no collective is made up."""
    notes = Notes(PlaceFile(place_path(tmp_path, 0)), lambda: 2, eager_steps=2)
    stage = nn.ModuleDict({"attn": nn.Bilinear(1, 1, 1)})
    with pytest.raises(TypeError), notes.modules([stage]):
        stage["attn"]()
    assert last_module(tmp_path, 0) == "attn"
    assert last_place(tmp_path, 0) is None
    assert last_module(tmp_path, 1) == ""


# ---- what a rank gives


def _operator(name: str, *arguments: str) -> Any:
    names = [SimpleNamespace(name=argument) for argument in arguments]
    return SimpleNamespace(_schema=SimpleNamespace(name=name, arguments=names))


ALL_GATHER = _operator("c10d::_allgather_base_", "output_tensor", "input_tensor", "process_group")
SUM = _operator("c10d::allreduce_", "tensors", "process_group")


def _taken(rank: Rank, func: Any, *args: Any) -> GivenCall:
    rank.unit, rank.notes.gives = "layers.1", True
    rank.notes.entering(func, (*args, "0"))
    event = rank.notes.given(1, 3)
    assert rank.notes.given(1, 4).detail == {"calls": []}
    records = RankRecords(
        rank=1, start=None, steps=(), events=(event,), error=None, end=None, problems=()
    )
    assert given_in(records, 4) == ()
    (call,) = given_in(records, 3)
    return call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_is_brought_along_decides_the_digest(rank: Rank, dtype: torch.dtype) -> None:
    """Every bit of the input counts, in any dtype and layout; what the output holds does not."""
    one, other = torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype)
    call = _taken(rank, ALL_GATHER, one, other)
    assert (call.operator, call.label, call.group) == ("allgather_base", "layers.1", (0, 1))
    assert _taken(rank, ALL_GATHER, other, other) == call
    assert _taken(rank, ALL_GATHER, one, one) != call
    assert _taken(rank, ALL_GATHER, one, torch.ones(4, 2, dtype=dtype)[:, 0]) == call
    # Its storage can still be given back and made larger, as pools of buffers do.
    assert other.untyped_storage().resizable()


def test_all_tensors_of_a_list_count(rank: Rank) -> None:
    """An all-reduce takes several."""
    a, b = torch.zeros(2), torch.ones(2)
    assert _taken(rank, SUM, [a, b]) == _taken(rank, SUM, [a.clone(), b.clone()])
    assert _taken(rank, SUM, [a, b]) != _taken(rank, SUM, [a, a])


def test_damage_is_nothing_given() -> None:
    """An event of another shape is no answer, and no crash either."""
    event = EventRecord(name=GIVEN, rank=1, step=3, detail={"calls": [{"operator": 1}]})
    records = RankRecords(
        rank=1, start=None, steps=(), events=(event,), error=None, end=None, problems=()
    )
    assert given_in(records, 3) == ()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", [contextlib.nullcontext, StorageCounter])
def test_every_collective_is_seen_with_and_without_a_mode(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    """Entered once and left once, whoever else looks at operators; nothing else is seen."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    seen: list[str] = []
    monkeypatch.setattr(Notes, "entering", lambda self, func, args: seen.append(func.__name__))
    monkeypatch.setattr(Notes, "left", lambda self: seen.append("left"))
    tensor = torch.ones(2)
    with mode(), noted(Device("cpu"), tmp_path / "place", lambda: 0, 2):
        dist.all_reduce(tensor)
        tensor.add_(1)
        work = dist.broadcast(tensor, 0, async_op=True)
        work.wait()
        assert dist.group.WORLD is not None
        funcol.wait_tensor(funcol.all_reduce(tensor, "sum", dist.group.WORLD))
    dist.all_reduce(tensor)
    assert seen[::2] == [
        "allreduce_.default", "broadcast_.default", "all_reduce.default", "wait_tensor.default",
    ]  # fmt: skip
    assert set(seen[1::2]) == {"left"}
