"""Tables of records, and how values are shown."""

import dataclasses
import struct
from typing import Any

import pytest

from harness.checks import within
from harness.checks.evidence import (
    BEFORE,
    count,
    rank_table,
    shared_pairs,
    show_float,
    state_table,
    step_table,
)
from harness.codec import MAX_INT, RecordError
from harness.float_bits import FloatBits, ulp_distance


def test_tables_hold_every_rank_and_step(make_lab: Any) -> None:
    """Of 16 ranks each, in the order of steps and then ranks, the state before step 0 first."""
    lab = make_lab(world_size=16)
    run, _, other = lab.legs()
    steps = [(step, rank) for step in range(lab.steps) for rank in range(16)]
    states = [(BEFORE, rank) for rank in range(16)]
    assert list(step_table(run)) == steps
    assert list(state_table(run)) == states + steps
    assert shared_pairs(state_table(run), state_table(other)) == states + steps
    assert list(rank_table(run)) == list(range(16))
    for (step, rank), record in step_table(run).items():
        assert record is run.ranks[rank].steps[step]
    for _, rank in states:
        assert state_table(run)[BEFORE, rank] is run.ranks[rank].initial


@pytest.mark.parametrize(
    ("number", "noun", "told"),
    [
        (1, "microbatch", "1 microbatch"),
        (2, "microbatch", "2 microbatches"),
        (0, "tensor", "0 tensors"),
        (3, "rank", "3 ranks"),
    ],
)
def test_a_number_of_things_is_plural_unless_one(number: int, noun: str, told: str) -> None:
    """Nouns that end in a hiss take -es."""
    assert count(number, noun) == told


def test_a_second_record_of_a_step_does_not_hide_the_first(lab: Any, edit: Any) -> None:
    """What was recorded first is compared: here it differs, and what follows it does not."""
    reference, _, candidate = lab.legs()
    right = candidate.ranks[0].steps[1]
    wrong = dataclasses.replace(right, loss=reference.ranks[1].steps[3].loss)
    steps = (candidate.ranks[0].steps[0], wrong, right, *candidate.ranks[0].steps[2:])
    twice = edit.rank(candidate, 0, steps=steps)
    assert step_table(twice)[1, 0] is wrong
    assert within.loss(reference, twice).outcome == "failed"


def f64(value: float) -> FloatBits:
    return FloatBits.from_hex(struct.pack(">d", value).hex())


def f32(value: float) -> FloatBits:
    return FloatBits.from_hex(struct.pack(">f", value).hex())


@pytest.mark.parametrize("make", [f32, f64])
def test_bits_and_value_go_together(make: type) -> None:
    """Both widths come back from JSON as they were, and finite is what has a value."""
    for value in (0.0, -0.0, 1.5, float("inf"), float("nan")):
        held = make(value)
        assert FloatBits.from_json(held.to_json()) == held
        assert held.finite is (value - value == 0)
        assert held.value == (value if held.finite else None)


@pytest.mark.parametrize("bits", ["", "3f8", "3F800000", "3f8000000", "g" * 16, "0" * 32])
def test_what_is_no_float_is_refused(bits: str) -> None:
    """Neither 8 nor 16 lower-case hex digits."""
    with pytest.raises(RecordError, match="hex digits"):
        FloatBits(bits=bits, value=0.0)


@pytest.mark.parametrize("make", [f32, f64])
def test_a_value_that_is_not_the_bits_is_refused(make: type) -> None:
    """The number for people cannot say another thing than what is compared."""
    with pytest.raises(RecordError, match="but value says"):
        FloatBits(bits=make(1.0).bits, value=2.0)


def test_distances() -> None:
    """In units of the width that both have; none between widths, to infinity, or past 64 bits."""
    assert ulp_distance(f32(1.0), f32(1 + 2.0**-23)) == 1
    assert ulp_distance(f64(1.0), f64(1 + 2.0**-52)) == 1
    assert ulp_distance(f64(-0.0), f64(0.0)) == 0
    assert ulp_distance(f32(1.0), f64(1.0)) is None
    assert ulp_distance(f64(1.0), f64(float("inf"))) is None
    widest = ulp_distance(f64(-1e308), f64(1e308))
    assert widest is None or widest < MAX_INT


def test_shown_digits_tell_neighbours_apart() -> None:
    """Nine digits of a float32, seventeen of a float64; what is not finite is a word."""
    assert show_float(f32(0.1)) == "0.100000001 (0x3dcccccd)"
    assert show_float(f64(0.1)).split()[0] != show_float(f64(0.1 + 2.0**-55)).split()[0]
    for make in (f32, f64):
        shown = [show_float(make(value)).split()[0] for value in
                 (float("inf"), float("-inf"), float("nan"))]  # fmt: skip
        assert shown == ["inf", "-inf", "nan"]
