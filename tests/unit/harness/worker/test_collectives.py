"""What a rank notes of its collectives and of the exception that ends it: asked, never guessed."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_core.device import Device
from fsdp_core.dispatch import TensorError
from fsdp_core.fsdp.api import FSDPModule
from fsdp_core.graph.graph import CapturedFunction, GraphedCallable, GraphMaker, Segment
from fsdp_core.graph.recorder import StaleAddress
from fsdp_core.model.sharding import clip_grads
from fsdp_core.parallel.pipeline import Pipeline
from fsdp_core.stress.races import Access, Clocks, Race, RaceFound
from fsdp_core.train.build import AdamW
from fsdp_core.train.trainer import Trainer
from harness.engine.evidence import IN_CAPTURE, Place
from harness.records import GivenCall, RaceEvidence, RankRecords, StreamUse, given_in
from harness.worker import observe
from harness.worker.main import evidence_of
from harness.worker.observe import Notes
from tests.support.fake_engine import Patch


def operator(name: str, *arguments: str) -> Any:
    names = [SimpleNamespace(name=argument) for argument in arguments]
    return SimpleNamespace(_schema=SimpleNamespace(name=name, arguments=names))


GATHER = operator("c10d::_allgather_base_", "output_tensor", "input_tensor", "process_group")
SCATTER = operator("c10d::scatter_", "output_tensors", "input_tensors", "process_group")
SUM = operator("c10d::allreduce_", "tensors", "process_group")
REDUCE, WAIT = operator("c10d::_reduce_scatter_base_"), operator(observe._WAIT)
SEND = operator("c10d::send")


class Rank:
    """Runs collectives of (0, 1) as a rank would, with `unit` at work."""

    def __init__(self, monkeypatch: Patch) -> None:
        self.step, self.unit, self.captures = 0, "", False
        self.places: list[Place] = []
        self.notes = Notes(self, lambda: self.step, eager_steps=2)  # type: ignore[arg-type]
        monkeypatch.setattr(observe, "_unit_at_work", lambda: (self.unit, self.captures))
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
def rank(monkeypatch: Patch) -> Rank:
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
    # Another order has no labels from where it is another; the next step is looked at anew.
    assert rank.take(4, (GATHER, ""), (REDUCE, ""), (GATHER, "")) == ["root", "", ""]
    assert rank.take(5, (GATHER, ""), (GATHER, "")) == ["root", "layers.0"]


def test_a_rank_says_where_it_does_otherwise_than_before(rank: Rank) -> None:
    """From another operator or owner on to the end of the step; of captures, outside of one due."""
    usual = (GATHER, "root"), (GATHER, "layers.0"), (REDUCE, "layers.0")
    steps = [usual, usual, usual[::-1], usual, (usual[0], *usual[:2]), (*usual[:1], *usual[2:])]
    news = []
    for step, calls in enumerate(steps):
        first = len(rank.places)
        rank.take(step, *calls)
        news.append([place.is_new for place in rank.places[first::2]])
    assert news[:4] == [[False] * 3, [False] * 3, [True] * 3, [False] * 3]
    assert news[4:] == [[False, True, True], [False, True]]


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
    assert str(rank.places[-4].last.as_entered) == "allgather_base in a capture"
    rank.take(1, (GATHER, ""))
    assert [rank.places[at].is_new for at in (-6, -2)] == [False, True]  # due, and early
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


def test_what_raises_in_a_module_leaves_no_trace(rank: Rank) -> None:
    """Modules are called as before."""
    stage = nn.ModuleDict({"attn": nn.Bilinear(1, 1, 1)})
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
    # One list for each rank of the group; a rank that is not the root has none.
    scattered = rank.given(SCATTER, [one], [[one, other]])
    assert scattered == rank.given(SCATTER, [other], [[one.clone(), other]])
    assert scattered != rank.given(SCATTER, [one], [[one, one]])
    assert scattered != rank.given(SCATTER, [one], [])
    # Storage that was looked at can be given back and made larger, as pools of buffers do.
    assert other.untyped_storage().resizable()


def test_what_was_given_is_of_one_step(rank: Rank) -> None:
    rank.given(GATHER, torch.zeros(1), torch.zeros(1))
    records = records_of(rank.notes.given_event(1, 4))
    assert (len(given_in(records, 4)), given_in(records, 3)) == (1, ())
    rank.notes.begin()
    assert rank.notes.given_event(1, 5).detail == {"calls": []}


def caught(function: Callable[..., Any], *arguments: Any, **how: Any) -> BaseException:
    """What a function raises when it is given what it cannot use."""
    try:
        inspect.unwrap(function)(*arguments, **how)
    except Exception as error:  # noqa: BLE001 - whichever it is
        return error
    raise AssertionError(f"{function} did not raise")


def chained(error: BaseException, function: Callable[..., Any], *arguments: Any) -> BaseException:
    outer = caught(function, *arguments)
    outer.__cause__ = error
    return outer


FORWARD = caught(Pipeline._forward, None, None, None, 0)


@pytest.mark.parametrize(
    ("error", "phase"),
    [
        (FORWARD, "forward"),
        (caught(Pipeline._backward, None, None, None, 0), "backward"),
        (caught(torch.autograd.backward, None), "backward"),
        (caught(AdamW.step, None), "optimizer"),
        (caught(clip_grads, None, None, 1.0), "reduce"),
        (caught(Trainer._require_grads, None), "reduce"),
        (caught(FSDPModule.zero_main_grads, None), "forward"),
        (caught(CapturedFunction.__call__, None), "replay"),
        (caught(Trainer._capture, None, 0), "capture"),
        (chained(FORWARD, Trainer._capture, None, 0), "capture"),
        (chained(FORWARD, Pipeline._backward, None, None, None, 0), "backward"),
        (caught(int, "no number"), ""),
    ],
)
def test_a_phase_is_that_of_the_functions_that_an_exception_passed(
    error: BaseException, phase: str
) -> None:
    """A capture calls what a step calls, a backward may compute a forward again: these count."""
    assert evidence_of(error, [])["phase"] == phase


class _Inner(nn.Module):
    def forward(self, fails: bool) -> None:
        if fails:
            raise ValueError("refused")


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Inner()

    def forward(self, *, fails: bool, wraps: bool = False) -> None:
        try:
            self.inner(fails)
        except ValueError as error:
            if wraps:
                raise RuntimeError("given up") from error
            raise
        raise ValueError("of the outer one")


STAGE = nn.ModuleDict({"outer": _Outer()})


@pytest.mark.parametrize(
    ("error", "stage", "name"),
    [
        (caught(STAGE["outer"], fails=True), STAGE, "outer.inner"),
        (caught(STAGE["outer"], fails=False), STAGE, "outer"),
        (caught(STAGE["outer"], fails=True, wraps=True), STAGE, "outer.inner"),
        (caught(STAGE["outer"], fails=True), nn.ModuleDict(), ""),
        (ValueError("never raised"), STAGE, ""),
    ],
)
def test_the_innermost_module_of_the_cause_is_named(
    error: BaseException, stage: nn.Module, name: str
) -> None:
    """Not who passed the exception on, nor who gave up because of it, nor another model's."""
    assert evidence_of(error, [stage])["module"] == name


def test_a_capture_that_is_refused_at_its_end_has_the_name_of_its_segment() -> None:
    """No module runs any more when CUDA finds a stream that was not joined."""
    samples = (torch.ones(2),)
    segment = Segment(name="outer.inner", function=abs, samples=samples)
    graphed = GraphedCallable(GraphMaker(Device("cpu")), segment)
    graphed.capture_forward()
    error = caught(graphed.capture_forward)
    assert "empty" in str(error)
    assert evidence_of(error, [STAGE])["module"] == "outer.inner"


def test_the_place_is_the_innermost_of_the_cause_outside_of_torch() -> None:
    """Where torch noticed it says nothing; where it was called does."""

    def adds() -> None:
        torch.ones(2) + torch.ones(3)

    place = evidence_of(chained(caught(adds), clip_grads, None, None, 1.0), [])["raised_at"]
    file, function = place.split(" ")
    assert (file.partition(":")[0], function) == ("test_collectives.py", "adds")
    inside = evidence_of(caught(torch.nn.functional.linear, None, None), [])["raised_at"]
    assert inside.endswith(" caught")


def test_names_of_tensors_are_the_exceptions_own() -> None:
    """Also those of a cause; an attribute of another library's exception is none of a tensor."""
    stale = StaleAddress(["layers.0.w", "head"], "captured at 0x1, now at 0x2")
    assert evidence_of(stale, [])["tensors"] == ("layers.0.w", "head")
    lost = chained(TensorError("no gradient", "norm.weight"), clip_grads, None, None, 1.0)
    assert evidence_of(lost, [])["tensors"] == ("norm.weight",)
    other = ValueError("layers.0.w")
    other.names = ["layers.0.w"]  # type: ignore[attr-defined]
    assert evidence_of(other, [])["tensors"] == ()


def test_a_race_keeps_both_uses() -> None:
    """Tensor with its unit, streams, and whether gradients are in it."""
    clocks = Clocks()
    main, reduce = clocks.new_stream("main"), clocks.new_stream("reduce")
    earlier = Access(0, 4, reduce, 1, True, "c10d::_reduce_scatter_base_", "a.py:1")
    later = Access(0, 4, main, 2, False, "aten::add", "b.py:2")
    found = evidence_of(RaceFound([Race("grad buffer", "layers.1", earlier, later, True)]), [])
    assert found["race"] == RaceEvidence(
        tensor="grad buffer of unit layers.1", unit="layers.1", is_gradient=True,
        later=StreamUse(operator="aten::add", writes=False, stream="main", place="b.py:2"),
        earlier=StreamUse(
            operator="c10d::_reduce_scatter_base_", writes=True, stream="reduce", place="a.py:1"
        ),
    )  # fmt: skip
