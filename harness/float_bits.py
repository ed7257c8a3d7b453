"""A float32 as its raw bits: what is compared, beside a number for people."""

import struct
from dataclasses import dataclass
from typing import Self

from harness.codec import Json, RecordError


@dataclass(frozen=True, kw_only=True)
class FloatBits(Json):
    """A float32 as its 8 hex digits, big-endian, and as a number for people (None: not finite)."""

    bits: str
    value: float | None

    def __post_init__(self) -> None:
        if len(self.bits) != 8 or not set(self.bits) <= set("0123456789abcdef"):
            raise RecordError(f"bits: expected 8 lower-case hex digits, got {self.bits!r}")
        number = struct.unpack(">f", bytes.fromhex(self.bits))[0]
        shown = number if number - number == 0 else None
        if shown != self.value:
            raise RecordError(f"bits {self.bits} say {shown!r} but value says {self.value!r}")

    @classmethod
    def from_bits(cls, pattern: int) -> Self:
        """From the unsigned 32-bit integer view of a float32."""
        number = struct.unpack(">f", pattern.to_bytes(4, "big"))[0]
        return cls(bits=f"{pattern:08x}", value=number if number - number == 0 else None)

    @property
    def finite(self) -> bool:
        """Whether it is neither NaN nor infinite."""
        return self.value is not None


def ulp_distance(a: FloatBits, b: FloatBits) -> int | None:
    """Number of float32 values between `a` and `b` (0 for -0.0 against 0.0); None past infinity."""
    if not (a.finite and b.finite):
        return None
    return abs(_ordinal(int(a.bits, 16)) - _ordinal(int(b.bits, 16)))


def _ordinal(pattern: int) -> int:
    return -(pattern & 0x7FFFFFFF) if pattern & 0x80000000 else pattern
