"""Pipeline schedules: orders known from the paper, and properties of all of them by simulation."""

import itertools
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fsdp_core.parallel.pipeline_schedule import (
    Action,
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


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: make_schedule(2, 1, 0), "microbatches >= 1, got 0"),
        (lambda: make_schedule(4, 2, 6), "multiple of pp=4 microbatches.*got 6"),
        (lambda: make_schedule(4, 2, 2), "multiple of pp=4 microbatches.*got 2"),
        (lambda: split_layers(3, 4), "at least one layer for each of 4 stages, got 3"),
    ],
)
def test_illegal_shapes_name_the_rule(make: Callable[[], object], rule: str) -> None:
    """What a schedule cannot take is refused by the rule that it breaks."""
    with pytest.raises(ValueError, match=rule):
        make()


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
