"""Strict JSON round trip of frozen dataclasses: what does not fit its type is an error.

Floats that are compared are kept as their raw bits, beside a number for people.
"""

import dataclasses
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec

MAX_INT = 1 << 63


class RecordError(ValueError):
    """A record that does not decode; it is reported, never trusted."""


class Json:
    """Mixin: strict JSON round trip of a frozen dataclass, by its field types."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

    def __post_init__(self) -> None:
        """Hold the defaults of keys that were left out: msgspec leaves them to the class."""
        if len(self.__dict__) < len(fields := dataclasses.fields(self)):
            self.__dict__.update({f.name: getattr(self, f.name) for f in fields})

    def to_json(self) -> dict[str, Any]:
        """Plain JSON-ready values, in containers of their own."""
        plain: dict[str, Any] = msgspec.to_builtins(self, enc_hook=_base)
        return plain

    @classmethod
    def from_json(cls, plain: object) -> Self:
        """Rebuild from `to_json`'s output.

        Raises:
            RecordError: not a mapping, unknown or missing key, or a value of the wrong type; with
                the path of the key.
        """
        if isinstance(plain, dict) and (unknown := plain.keys() - cls.__dataclass_fields__.keys()):
            raise RecordError(f"{cls.__name__}: unknown keys {sorted(unknown)}")
        try:
            return msgspec.convert(plain, cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RecordError(f"{cls.__name__}: {error}") from error


def dumps(value: Json | Mapping[str, Any]) -> str:
    """One line of JSON with sorted keys and no NaN."""
    plain = value.to_json() if isinstance(value, Json) else value
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


def strict_loads(data: bytes | str) -> Any:
    """The value of a text of JSON, by the standard library: msgspec refuses half surrogate pairs.

    Raises:
        ValueError: not UTF-8, not JSON, no number of 64 bits, a key twice, or nested too deeply.
    """
    try:
        text = data if isinstance(data, str) else data.decode()
        return json.loads(text, parse_constant=_refuse, parse_int=_bounded, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _base(value: object) -> object:
    """What a value of another library is: the version of torch is a text, too."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} {value!r:.80} is not JSON")


def _bounded(text: str) -> int:
    if not -MAX_INT <= (value := int(text)) < MAX_INT:
        raise ValueError(f"{text:.40} has more than 64 bits")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("a key twice in one object")
    return found


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


# --- floats ---------------------------------------------------------------------------------

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
        if (shown := _finite(self.bits)) != self.value:
            raise RecordError(f"bits {self.bits} say {shown!r} but value says {self.value!r}")

    @classmethod
    def from_bits(cls, pattern: int) -> Self:
        """From the unsigned 32-bit integer view of a float32."""
        return cls.from_hex(f"{pattern:08x}")

    @classmethod
    def from_hex(cls, bits: str) -> Self:
        """From 8 hex digits of a float32 or 16 of a float64 (`RecordError`: neither)."""
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
