"""Whose a collective is, and what a rank gives to it: asked in eager steps, never guessed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness.engine.collective_log import IN_CAPTURE, Place, PlaceFile, place_path
from harness.engine.evidence import last_module, last_place
from harness.records import GivenCall, RankRecords, given_in
from harness.worker import collectives
from harness.worker.collectives import Notes


def operator(name: str, *arguments: str) -> Any:
    names = [SimpleNamespace(name=argument) for argument in arguments]
    return SimpleNamespace(_schema=SimpleNamespace(name=name, arguments=names))


GATHER = operator("c10d::_allgather_base_", "output_tensor", "input_tensor", "process_group")
SUM = operator("c10d::allreduce_", "tensors", "process_group")
REDUCE, WAIT = operator("c10d::_reduce_scatter_base_"), operator(collectives._WAIT)
SEND = operator("c10d::send")


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

    def given(self, func: Any, *args: Any) -> GivenCall:
        """What is recorded of what it gives to one collective in step 3."""
        self.unit, self.notes.given = "layers.1", []
        self.notes.entering(func, (*args, "0"))
        (call,) = given_in(records_of(self.notes.given_event(1, 3)), 3)
        return call


def records_of(event: Any) -> RankRecords:
    return RankRecords(
        rank=1, start=None, steps=(), events=(event,), error=None, end=None, problems=()
    )


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
    attention.norm(torch.ones(1))
    assert len(rank.places) == 4
    assert "_call_impl" not in vars(attention)
    assert vars(attention.norm)["_call_impl"] is own


def test_a_rank_that_dies_leaves_the_module_behind(tmp_path: Path) -> None:
    notes = Notes(PlaceFile(place_path(tmp_path, 0)), lambda: 2, eager_steps=2)
    stage = nn.ModuleDict({"attn": nn.Bilinear(1, 1, 1)})
    with pytest.raises(TypeError), notes.modules([stage]):
        stage["attn"]()
    assert last_module(tmp_path, 0) == "attn"
    assert last_place(tmp_path, 0) is None
    assert last_module(tmp_path, 1) == ""


def test_what_raises_outside_of_a_step_or_in_a_module_leaves_no_trace(rank: Rank) -> None:
    """Notes of a step go on, and modules are called as before."""
    stage = nn.ModuleDict({"attn": nn.Bilinear(1, 1, 1)})
    given: list[GivenCall] = []
    rank.notes.given = given
    with pytest.raises(TypeError), rank.notes.outside_of_steps():
        stage["attn"]()
    assert rank.notes.given is given
    with pytest.raises(TypeError), rank.notes.modules([stage]):
        stage["attn"]()
    assert "_call_impl" not in vars(stage["attn"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_is_brought_along_decides_the_digest(rank: Rank, dtype: torch.dtype) -> None:
    """Every bit of the input counts, in any dtype and layout; what the output holds does not."""
    one, other = torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype)
    call = rank.given(GATHER, one, other)
    assert (call.operator, call.label, call.group) == ("allgather_base", "layers.1", (0, 1))
    assert rank.given(GATHER, other, other) == call
    assert rank.given(GATHER, one, one) != call
    assert rank.given(GATHER, one, torch.ones(4, 2, dtype=dtype)[:, 0]) == call
    assert rank.given(GATHER, one, -other if dtype.is_floating_point else other + 1) != call
    assert rank.given(SUM, [one, other]) == rank.given(SUM, [one.clone(), other.clone()])
    assert rank.given(SUM, [one, other]) != rank.given(SUM, [one, one])
    # Storage that was looked at can be given back and made larger, as pools of buffers do.
    assert other.untyped_storage().resizable()


def test_what_was_given_is_of_one_step_and_damage_is_nothing(rank: Rank) -> None:
    rank.given(GATHER, torch.zeros(1), torch.zeros(1))
    event = rank.notes.given_event(1, 4)
    assert event.detail == {"calls": []}
    event.detail["calls"] = [{"operator": 1}]
    assert given_in(records_of(event), 4) == given_in(records_of(event), 3) == ()
