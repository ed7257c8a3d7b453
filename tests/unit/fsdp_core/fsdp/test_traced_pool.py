"""The traced pool: the plan as a function of a timeline, and its phases trace, plan, replay."""

import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fsdp_core.device import Device, HostStream
from fsdp_core.fsdp.pool import Interval, Key, PlannedSlot, Timeline, TracedPool, plan_slots

NUMEL = 64
GATHER = [Key(owner, "gather") for owner in range(6)]
GRAD = [Key(owner, "grad") for owner in range(6)]
SIZES = [(8, torch.float32), (8, torch.bfloat16), (16, torch.bfloat16), (64, torch.float32)]
Move = tuple[str, Key]
"""`take` or `give`, and the key."""


def size_of(key: Key) -> tuple[int, torch.dtype]:
    return SIZES[key.owner % len(SIZES)]


def toggles(keys: list[Key]) -> list[Move]:
    """Each key in turn is acquired, or released if it is held; at the end all are released."""
    moves: list[Move] = []
    held: list[Key] = []
    for key in [*keys, *dict.fromkeys(keys)]:
        if key in held:
            held.remove(key)
            moves.append(("give", key))
        elif len(moves) < len(keys):
            held.append(key)
            moves.append(("take", key))
    return moves


def record(moves: list[Move], sizes: Any = size_of) -> list[Interval]:
    timeline = Timeline()
    for what, key in moves:
        if what == "take":
            timeline.acquired(key, *sizes(key))
        else:
            timeline.released(key)
    assert not timeline.open
    return timeline.intervals


def planned_bytes(slots: Iterable[PlannedSlot]) -> int:
    return sum(slot.nbytes for slot in slots)


def overlap(a: Interval, b: Interval) -> bool:
    return a.start < b.stop and b.start < a.stop


def most_alive(intervals: list[Interval]) -> int:
    return max(sum(a.start <= b.start < a.stop for a in intervals) for b in intervals)


PASSES = st.lists(
    st.builds(Key, st.integers(0, 11), st.sampled_from(["gather", "grad"])), max_size=60
).map(toggles)


@settings(max_examples=100, deadline=None)
@given(spans=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=20))
@example(spans=[(5, 2), (0, 6), (3, 1), (6, 6), (2, 5)])  # in another order greedy needs a fourth
def test_equal_keys_of_one_interval_get_the_fewest_slots(spans: list[tuple[int, int]]) -> None:
    """The number of slots is the highest number of keys held at once: no plan has fewer."""
    intervals = [
        Interval(Key(owner, "gather"), NUMEL, torch.bfloat16, start, start + length)
        for owner, (start, length) in enumerate(spans)
    ]
    plan = plan_slots(intervals)
    assert len(plan) == most_alive(intervals)


def test_a_second_acquire_changes_no_interval() -> None:
    """A key is held from its first acquire to its release, however often it is acquired."""
    moves = [("take", GATHER[0]), ("take", GATHER[0]), ("give", GATHER[0])]
    assert record(moves) == [Interval(GATHER[0], *size_of(GATHER[0]), 1, 3)]


def training_moves(num_blocks: int, *, root: Key | None = None) -> list[Move]:
    """Blocks gathered one ahead, forward and backward; at most two gradient buffers live."""
    gathers = [Key(owner, "gather") for owner in range(num_blocks)]
    grads = [Key(owner, "grad") for owner in range(num_blocks)]
    moves: list[Move] = [("take", root)] if root else []
    for order in (range(num_blocks), range(num_blocks)[::-1]):
        is_backward = order[0] > order[-1]
        moves.append(("take", gathers[order[0]]))
        for place, block in enumerate(order):
            if place + 1 < num_blocks:
                moves.append(("take", gathers[order[place + 1]]))
            if is_backward:
                moves.append(("take", grads[block]))
            moves.append(("give", gathers[block]))
            if is_backward and place:
                moves.append(("give", grads[order[place - 1]]))
    moves.append(("give", grads[0]))
    return [*moves, ("give", root)] if root else moves


@pytest.mark.parametrize("num_blocks", [2, 3, 4, 7, 32])
def test_equal_blocks_need_two_slots_a_role(num_blocks: int) -> None:
    """However many blocks, gathering one ahead and draining one behind takes two slots a role."""
    plan = plan_slots(record(training_moves(num_blocks), lambda key: (NUMEL, torch.bfloat16)))
    roles = [{key.role for key in slot.keys}.pop() for slot in plan]
    assert sorted(roles) == ["gather", "gather", "grad", "grad"]


# ---- the pool


class Program:
    """Runs passes over a pool, writing each buffer and checking that nobody else did."""

    def __init__(self, *, persistent: bool = True) -> None:
        self.device = Device("cpu")
        self.pool = TracedPool(self.device, persistent_on_miss=persistent)
        self.stream = HostStream()
        self.held: dict[Key, torch.Tensor] = {}
        self.step = 0

    def take(self, key: Key) -> int:
        self.step += 1
        numel, dtype = size_of(key)
        tensor = self.pool.acquire(key, numel, dtype, self.stream)
        assert (tensor.shape, tensor.dtype) == ((numel,), dtype)
        self.held[key] = tensor.fill_(key.owner + 16 * (key.role == "grad"))
        return tensor.data_ptr()

    def give(self, key: Key) -> None:
        assert bool((self.held.pop(key) == key.owner + 16 * (key.role == "grad")).all())
        self.pool.release(key, self.stream)

    def run(self, moves: list[Move]) -> dict[Key, set[int]]:
        seen: dict[Key, set[int]] = {}
        for what, key in moves:
            if what == "take":
                seen.setdefault(key, set()).add(self.take(key))
            else:
                self.give(key)
        self.pool.end_of_pass()
        return seen


TRAINING = training_moves(5)
FORWARD = [move for move in TRAINING if move[1].role == "gather"][:10]


@settings(max_examples=100, deadline=None)
@given(moves=PASSES, persistent=st.booleans())
def test_replays_of_the_traced_pass_never_miss(moves: list[Move], persistent: bool) -> None:
    """From the second pass on each key has one address for ever, and memory is the plan's."""
    program = Program(persistent=persistent)
    whole = [*moves, *toggles([GATHER[0], GATHER[0], GRAD[0], GRAD[0]])]
    program.run(whole)
    expected = planned_bytes(plan_slots(record(whole)))
    assert program.pool.reserved_bytes() == expected
    addresses = program.run(whole)
    assert all(len(seen) == 1 for seen in addresses.values())
    assert program.run(whole) == addresses
    assert program.pool.misses == 0
    assert program.pool.reserved_bytes() == expected


def test_the_timeline_ends_with_the_plan() -> None:
    """Nothing is recorded after the plan, so memory of the host does not grow with the steps."""
    program = Program(persistent=False)
    timeline = weakref.ref(program.pool._timeline)
    program.run(TRAINING)
    assert timeline() is None


def test_forward_only_passes_before_training_make_no_plan() -> None:
    """Evaluations before the first training pass leave no trace in the plan."""
    program, plain = Program(), Program()
    for _ in range(3):
        program.run([*toggles(GATHER), *FORWARD])
        assert program.pool.reserved_bytes() == 0
    program.run(TRAINING)
    plain.run(TRAINING)
    assert program.pool.reserved_bytes() == plain.pool.reserved_bytes() > 0


@pytest.mark.parametrize("gathers", [True, False])
def test_gradients_alone_make_a_plan_only_where_nothing_is_gathered(gathers: bool) -> None:
    """A pass that only reduces is a training pass without gathers (no_shard), else part of one."""
    program = Program()
    program.run(FORWARD if gathers else [])
    program.run(toggles([GRAD[0], GRAD[0], GRAD[4], GRAD[4]]))
    assert program.pool.reserved_bytes() == (0 if gathers else 32)


def test_a_plan_waits_until_nothing_is_held() -> None:
    """A pass that ends with a buffer out is planned later, with the next pass in the timeline."""
    program = Program()
    moves = training_moves(3)
    program.take(GATHER[5])
    for _ in range(2):
        program.run(moves)
        assert program.pool.reserved_bytes() == 16, "planned beside a held buffer"
    program.give(GATHER[5])
    program.pool.end_of_pass()
    planned = program.pool.reserved_bytes()
    assert planned > 16
    # The held key had its slot to itself while everything else came and went.
    program.run([("take", GATHER[5]), *moves, ("give", GATHER[5])])
    assert program.pool.misses == 0
    assert program.pool.reserved_bytes() == planned


@pytest.mark.parametrize("persistent", [True, False])
def test_evaluations_leave_plan_and_addresses(persistent: bool) -> None:
    """Forward passes in any order, with modules never trained, change no trained address."""
    program = Program(persistent=persistent)
    program.run(TRAINING)
    addresses = program.run(TRAINING)
    reserved = program.pool.reserved_bytes()
    stranger = Key(7, "gather")
    for _ in range(3):
        with torch.no_grad():
            program.run([(what, key) for what in ("take", "give") for key in GATHER[:5]])
            program.run(toggles([stranger, *GATHER[4::-1]]))
        assert program.run(TRAINING) == addresses
    assert program.pool.misses > 0
    assert (program.pool.reserved_bytes() > reserved) is persistent


def test_freezing_before_the_plan_is_refused() -> None:
    """Graphs captured while addresses still change would read foreign data."""
    program = Program()
    program.run(FORWARD)
    with pytest.raises(RuntimeError, match=r"Expected a whole training pass.*let go of outputs"):
        program.pool.freeze()
    program.run(TRAINING)
    program.pool.freeze()


def test_a_frozen_plan_refuses_a_taken_slot_and_serves_unseen_keys() -> None:
    """Planned keys stay where graphs expect them or fail by name; others get their own buffers."""
    program = Program()
    program.run(TRAINING)
    addresses = program.run(TRAINING)
    program.pool.freeze()
    home = addresses[GATHER[0]]
    rival = next(key for key in GATHER[1:] if addresses.get(key) == home)
    program.take(GATHER[0])
    with pytest.raises(RuntimeError, match="a graph would read foreign data") as caught:
        program.take(rival)
    assert str(rival) in str(caught.value)
    assert str(GATHER[0]) in str(caught.value)
    stranger = program.take(Key(7, "gather"))
    assert {stranger} not in addresses.values()
    program.give(GATHER[0])
    program.give(Key(7, "gather"))
    assert program.run(TRAINING) == addresses


def test_a_pool_frozen_before_its_first_use_serves_every_key() -> None:
    """With nothing handed out there is nothing to plan: each key gets a buffer of its own."""
    program = Program()
    program.pool.freeze()
    addresses = program.run(TRAINING)
    assert program.run(TRAINING) == addresses
    assert len({frozenset(seen) for seen in addresses.values()}) == len(addresses) == 10


def test_a_plan_that_does_not_fit_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """If memory for a slot is refused, the pool stays in its trace, holds nothing and goes on."""
    program = Program()
    with program.device.counting_memory():
        real, made = torch.empty, []

        def refuse_third(*args: Any, **kwargs: Any) -> torch.Tensor:
            made.append(args)
            if len(made) == 3:
                raise torch.OutOfMemoryError("no memory")
            return real(*args, **kwargs)

        for what, key in TRAINING:
            program.take(key) if what == "take" else program.give(key)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", refuse_third)
            with pytest.raises(torch.OutOfMemoryError):
                program.pool.end_of_pass()
        assert program.pool.reserved_bytes() == program.device.live_bytes() == 0
        program.run(TRAINING)
        assert program.pool.reserved_bytes() == program.device.live_bytes() > 0
        program.run(TRAINING)
        assert program.pool.misses == 0


@settings(max_examples=150, deadline=None)
@given(moves=PASSES)
@example(moves=toggles([Key(owner, "grad") for owner in (0, 4, 0, 8, 4, 0)]))
def test_a_plan_holds_every_key_once(moves: list[Move]) -> None:
    """A slot a key, of its role and large enough; its slot mates are never held with it."""
    intervals = record(moves)
    plan = plan_slots(intervals)
    planned = [key for slot in plan for key in slot.keys]
    assert len(planned) == len(set(planned))
    assert set(planned) == {interval.key for interval in intervals}
    for slot in plan:
        assert len({key.role for key in slot.keys}) == 1
        inside = [interval for interval in intervals if interval.key in slot.keys]
        assert slot.nbytes == max(interval.nbytes for interval in inside)
        for a in inside:
            assert not any(overlap(a, b) for b in inside if b.key != a.key)
    total = planned_bytes(plan)
    assert total <= sum({interval.key: interval.nbytes for interval in intervals}.values())
    alive = [sum(a.nbytes for a in intervals if a.start <= b.start < a.stop) for b in intervals]
    assert total >= max(alive, default=0)
