"""Pipeline schedules: orders known from the paper, and properties of all of them by simulation."""

import itertools
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.pipeline import TensorSpec, TransferFailed, Transfers
from fsdp_core.parallel.pipeline_schedule import (
    Action,
    Exchange,
    Schedule,
    Transfer,
    make_schedule,
    programs,
    slots_needed,
    split_layers,
    timeline,
)
from tests.unit.fsdp_core.parallel.pipeline_simulator import exchange, peak_live, simulate


@st.composite
def legal(draw: st.DrawFn, *, trains: bool = True) -> tuple[int, int, int]:
    pp, chunks = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    if trains and chunks > 1:
        return pp, chunks, pp * draw(st.integers(1, 4))
    return pp, chunks, draw(st.integers(1, 14))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    is_training = draw(st.booleans())
    return make_schedule(*draw(legal(trains=is_training)), is_training=is_training)


def words(actions: tuple[Action, ...]) -> str:
    """Actions as F or B, microbatch, and chunk as a prime for each."""
    return " ".join(f"{'BF'[a.is_forward]}{a.microbatch}{chr(39) * a.chunk}" for a in actions)


# ---- orders written down by hand


def test_1f1b_of_the_paper() -> None:
    """Four ranks, eight microbatches: figure 4 of Narayanan et al., upper half's order."""
    assert [words(actions) for actions in make_schedule(4, 1, 8).actions] == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_interleaved_of_two_ranks() -> None:
    """Two ranks with two chunks: groups of two microbatches a chunk, backward last chunk first."""
    assert [words(actions) for actions in make_schedule(2, 2, 4).actions] == [
        "F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3",
        "F0 F1 F0' B0' F1' B1' F2 B0 F3 B1 F2' B2' F3' B3' B2 B3",
    ]


def test_forward_only_keeps_groups() -> None:
    """One chunk takes microbatches as they come, more take them in groups of pp."""
    orders = {
        (2, 1, 3): "F0 F1 F2",
        (2, 2, 4): "F0 F1 F0' F1' F2 F3 F2' F3'",
        (2, 2, 3): "F0 F1 F0' F1' F2 F2'",
    }
    for shape, order in orders.items():
        schedule = make_schedule(*shape, is_training=False)
        assert [words(actions) for actions in schedule.actions] == [order] * 2


def test_exchanges_of_two_ranks() -> None:
    """In steady state an activation goes one way and a gradient the other in one exchange."""
    first, last = programs(make_schedule(2, 1, 3))
    act = [Transfer(0, 1, i) for i in range(3)]
    grad = [Transfer(1, 0, i) for i in range(3)]
    forward = [Action(True, 0, i) for i in range(3)]
    backward = [Action(False, 0, i) for i in range(3)]
    assert first == (
        forward[0], exchange(act[0]), forward[1], exchange(act[1], grad[0]), backward[0],
        forward[2], exchange(act[2], grad[1]), backward[1], exchange(grad[2]), backward[2],
    )  # fmt: skip
    assert last == (
        exchange(act[0]), forward[0], exchange(act[1]), backward[0], exchange(grad[0]),
        forward[1], backward[1], exchange(act[2], grad[1]), forward[2], backward[2],
        exchange(grad[2]),
    )  # fmt: skip


# ---- properties of every schedule


@given(schedules())
def test_every_action_once(schedule: Schedule) -> None:
    """Each rank does each of its actions once, each chunk's in the order of the microbatches."""
    kinds = (True, False) if schedule.is_training else (True,)
    chunks, microbatches = range(schedule.chunks), range(schedule.microbatches)
    expected = {Action(*each) for each in itertools.product(kinds, chunks, microbatches)}
    assert len(schedule.actions) == schedule.pp
    for actions in schedule.actions:
        assert len(actions) == len(expected)
        assert set(actions) == expected
        for kind, chunk in itertools.product(kinds, chunks):
            order = [a.microbatch for a in actions if (a.is_forward, a.chunk) == (kind, chunk)]
            assert order == list(microbatches)


@settings(deadline=None)
@given(schedules(), st.booleans())
def test_programs_end(schedule: Schedule, batched: bool) -> None:
    """Blocking messages, one by one or an exchange at a time.

    A rank keeps as many forward passes as the theory says, no fewer and no more.
    """
    ranks = simulate(schedule, programs(schedule), batched=batched)
    assert [tuple(rank.done) for rank in ranks] == list(schedule.actions)
    shape = schedule.pp, schedule.chunks, schedule.microbatches
    due = [peak_live(*shape, rank) if schedule.is_training else 0 for rank in range(schedule.pp)]
    assert [rank.peak for rank in ranks] == due


@given(legal())
def test_bubble(shape: tuple[int, int, int]) -> None:
    """A rank is idle for (pp - 1) / (chunks * microbatches) of the time that it works."""
    pp, chunks, microbatches = shape
    times = timeline(make_schedule(*shape))
    end = max(own[-1][1] for own in times)
    work = chunks * microbatches * 3
    for own in times:
        assert sum(stop - start for start, stop in own) == work
        assert Fraction(end - work, work) == Fraction(pp - 1, chunks * microbatches)


@given(legal())
def test_slots(shape: tuple[int, int, int]) -> None:
    """With as many slots as needed none is taken before its backward, with one less one is."""
    schedule = make_schedule(*shape)
    needed = slots_needed(schedule)
    assert not any(reuses_a_slot(actions, needed) for actions in schedule.actions)
    assert needed == 1 or any(reuses_a_slot(actions, needed - 1) for actions in schedule.actions)


def reuses_a_slot(actions: tuple[Action, ...], slots: int) -> bool:
    """Whether a forward takes a slot of its chunk that waits for its backward."""
    taken: set[tuple[int, int]] = set()
    for action in actions:
        slot = action.chunk, action.microbatch % slots
        if action.is_forward and slot in taken:
            return True
        (taken.add if action.is_forward else taken.discard)(slot)
    return False


def test_slots_of_1f1b_are_its_peak() -> None:
    """One chunk needs a slot for each pass that waits; forwards alone need one."""
    assert slots_needed(make_schedule(4, 1, 8)) == 4
    assert slots_needed(make_schedule(4, 1, 8, is_training=False)) == 1


# ---- layers over stages


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 4))
def test_layers_are_dealt_evenly(layers: int, pp: int, chunks: int) -> None:
    """Stages in order hold all layers in order, and differ by one at most."""
    assume(layers >= pp * chunks)
    split = split_layers(layers, pp, chunks)
    assert [len(rank) for rank in split] == [chunks] * pp
    stages = [part for chunk in zip(*split, strict=True) for part in chunk]
    assert list(itertools.chain.from_iterable(stages)) == list(range(layers))
    sizes = [len(part) for part in stages]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((8, 4), [2, 2, 2, 2]),
        ((10, 4), [2, 3, 3, 2]),
        ((11, 4), [3, 3, 3, 2]),
        ((9, 2, 2), [2, 2, 3, 2]),
        ((1, 1), [1]),
    ],
)
def test_who_gets_what_does_not_divide(shape: tuple[int, ...], sizes: list[int]) -> None:
    """Later stages first, the last one at the end."""
    split = split_layers(*shape)
    assert [len(part) for chunk in zip(*split, strict=True) for part in chunk] == sizes


# --- transfers where a batch has one work for all its messages, and is asked instead of waited for


SPEC = TensorSpec((2,), torch.float32)
TO_NEXT, FROM_NEXT = Transfer(0, 1, 0), Transfer(1, 0, 0)


@dataclass
class Work:
    waits: int = 0
    done: bool = False
    error: str = ""

    def wait(self) -> None:
        self.waits += 1
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return self.done


@dataclass
class Group:
    """Stands for a process group: keeps the batches that were posted."""

    batches: list[list[Any]] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)

    def batch(self, operations: list[Any]) -> list[Work]:
        self.batches.append(operations)
        self.works.append(Work())
        return self.works[-1:]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    group = Group()
    monkeypatch.setattr(dist, "batch_isend_irecv", group.batch)
    monkeypatch.setattr(
        dist, "P2POp", lambda op, tensor, group, group_peer: (op, tensor, group_peer)
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return group


def transfers(group: Group, device: str) -> Transfers:
    axis = Axis("pp", 2, 0, cast("dist.ProcessGroup", group))
    return Transfers(axis, SPEC, torch.device(device))


def outbox(microbatch: int = 0) -> dict[Transfer, torch.Tensor]:
    return {Transfer(0, 1, microbatch): torch.ones(2)}


def test_one_work_for_a_batch(group: Group) -> None:
    """Whoever takes anything of the batch waits for the whole; all messages go out together."""
    ours, box = transfers(group, "cpu"), outbox()
    ours.post(Exchange((TO_NEXT, FROM_NEXT)), box)
    (operations,) = group.batches
    kinds = [(operation, peer) for operation, _, peer in operations]
    assert kinds == [(dist.isend, 1), (dist.irecv, 1)]
    assert box == {}
    assert group.works[0].waits == 0
    assert ours.take(FROM_NEXT) is operations[1][1]
    assert group.works[0].waits == 1
    ours.finish()
    assert group.works[0].waits == 2


def held(ours: Transfers) -> int:
    return len(ours._sent)


def test_on_cuda_sends_are_asked_before_they_are_waited_for(group: Group) -> None:
    """What is not done yet is kept, what is done is let go, and only the end waits for more."""
    ours = transfers(group, "cuda")
    for microbatch in range(3):
        ours.post(Exchange((Transfer(0, 1, microbatch),)), outbox(microbatch))
        assert held(ours) == (microbatch + 1 if microbatch < 2 else 2)
        group.works[0].done = microbatch >= 1
    assert [work.waits for work in group.works] == [1, 0, 0]
    ours.finish()
    assert [work.waits for work in group.works] == [1, 1, 1]


def test_on_cuda_a_send_that_failed_is_named(group: Group) -> None:
    """NCCL says of a work that failed that it is completed; its wait says that it failed."""
    ours = transfers(group, "cuda")
    ours.post(Exchange((TO_NEXT,)), outbox())
    group.works[0].done, group.works[0].error = True, "NCCL error"
    with pytest.raises(TransferFailed, match=r"stage 1 to take the activation .* says: NCCL error"):
        ours.post(Exchange((FROM_NEXT,)), {})


def test_a_capture_waits(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of a capture must not be asked; waiting for them is part of the graph."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    ours = transfers(group, "cuda")
    ours.post(Exchange((TO_NEXT,)), outbox())
    ours.post(Exchange((Transfer(0, 1, 1),)), outbox(1))
    assert [work.waits for work in group.works] == [1, 0]
    assert held(ours) == 1


def test_what_is_waited_for_is_named(group: Group) -> None:
    """The group's words come with ours: which tensor, from or to whom."""
    ours = transfers(group, "cpu")
    ours.post(Exchange((TO_NEXT, FROM_NEXT)), outbox())
    group.works[0].error = "Timed out"
    with pytest.raises(TransferFailed, match=r"stage 1 to send the gradient .* says: Timed out"):
        ours.take(FROM_NEXT)
    with pytest.raises(TransferFailed, match=r"stage 1 to take the activation .* says: Timed out"):
        ours.finish()
