"""Floats as raw bits: widths, values for people, distances, what is refused."""

import struct

import pytest

from harness.checks.evidence import show_float
from harness.codec import MAX_INT, RecordError
from harness.float_bits import FloatBits, ulp_distance


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
