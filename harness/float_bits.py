"""A float as its raw bits: what is compared, beside a number for people."""

import struct
from dataclasses import dataclass
from typing import Self

from harness.codec import MAX_INT, Json, RecordError

_FORMS = {8: ">f", 16: ">d"}
"""Hex digits to how they are unpacked."""


@dataclass(frozen=True, kw_only=True)
class FloatBits(Json):
    """A float32 as its 8 hex digits or a float64 as its 16, big-endian.

    `value` is the number for people, None where it is not finite.
    """

    bits: str
    value: float | None

    def __post_init__(self) -> None:
        if len(self.bits) not in _FORMS or not set(self.bits) <= set("0123456789abcdef"):
            raise RecordError(f"bits: expected 8 or 16 lower-case hex digits, got {self.bits!r}")
        shown = _finite(self.bits)
        if shown != self.value:
            raise RecordError(f"bits {self.bits} say {shown!r} but value says {self.value!r}")

    @classmethod
    def from_bits(cls, pattern: int) -> Self:
        """From the unsigned 32-bit integer view of a float32."""
        return cls.from_hex(f"{pattern:08x}")

    @classmethod
    def from_hex(cls, bits: str) -> Self:
        """From 8 hex digits of a float32 or 16 of a float64.

        Raises:
            RecordError: neither.
        """
        return cls(bits=bits, value=_finite(bits) if len(bits) in _FORMS else None)

    @property
    def finite(self) -> bool:
        """Whether it is neither NaN nor infinite."""
        return self.value is not None

    @property
    def is_double(self) -> bool:
        """Whether it is a float64."""
        return len(self.bits) == 16


def ulp_distance(a: FloatBits, b: FloatBits) -> int | None:
    """Number of floats of their width between `a` and `b` (0 for -0.0 against 0.0).

    None past infinity, between two widths, and past 63 bits.
    """
    if not (a.finite and b.finite) or a.is_double != b.is_double:
        return None
    distance = abs(_ordinal(a) - _ordinal(b))
    return distance if distance < MAX_INT else None


def _ordinal(value: FloatBits) -> int:
    pattern, sign = int(value.bits, 16), 1 << (4 * len(value.bits) - 1)
    return -(pattern & (sign - 1)) if pattern & sign else pattern


def _finite(bits: str) -> float | None:
    number: float = struct.unpack(_FORMS[len(bits)], bytes.fromhex(bits))[0]
    return number if number - number == 0 else None
