"""Floats as bits: what is compared, and what is shown beside them."""

import struct

import pytest

from harness.codec import MAX_INT, RecordError
from harness.records import FloatBits, ulp_distance


def f64(value: float) -> FloatBits:
    return FloatBits.from_hex(struct.pack(">d", value).hex())


def f32(value: float) -> FloatBits:
    return FloatBits.from_hex(struct.pack(">f", value).hex())


@pytest.mark.parametrize("make", [f32, f64])
def test_bits_and_value_go_together(make: type) -> None:
    """Both widths come back from JSON as they were; the number cannot say another thing."""
    for value in (0.0, -0.0, 1.5, float("inf"), float("nan")):
        held = make(value)
        assert FloatBits.from_json(held.to_json()) == held
        assert held.finite is (value - value == 0)
        assert held.value == (value if held.finite else None)
    with pytest.raises(RecordError, match="but value says"):
        FloatBits(bits=make(1.0).bits, value=2.0)


@pytest.mark.parametrize("bits", ["", "3f8", "3F800000", "3f8000000", "g" * 16, "0" * 32])
def test_what_is_no_float_is_refused(bits: str) -> None:
    """Neither 8 nor 16 lower-case hex digits."""
    with pytest.raises(RecordError, match="hex digits"):
        FloatBits(bits=bits, value=0.0)


def test_distances() -> None:
    """In units of the width that both have; none between widths, to infinity, or past 64 bits."""
    assert ulp_distance(f32(1.0), f32(1 + 2.0**-23)) == 1
    assert ulp_distance(f64(1.0), f64(1 + 2.0**-52)) == 1
    assert ulp_distance(f64(-0.0), f64(0.0)) == 0
    assert ulp_distance(f32(1.0), f64(1.0)) is None
    assert ulp_distance(f64(1.0), f64(float("inf"))) is None
    widest = ulp_distance(f64(-1e308), f64(1e308))
    assert widest is None or widest < MAX_INT
