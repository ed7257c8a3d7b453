"""Values of specifications and records: strict JSON, bits of floats, soaks, tolerances.

Frozen dataclasses make the round trip through JSON: what does not fit its type is an error. Floats
that are compared are kept as their raw bits, beside a number for people.
"""

import dataclasses
import json
import math
import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import msgspec

MAX_INT = 1 << 63
TIERS = ("smoke", "pr", "nightly", "weekly")
SELECTIONS = ("all", "pairwise")
"""Of scenarios: when they run, and which of their cases do."""


class RecordError(ValueError):
    """A record that does not decode; it is reported, never trusted."""


class Json:
    """Mixin: strict JSON round trip of a frozen dataclass, by its field types."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

    def __post_init__(self) -> None:
        """Hold the defaults of keys that were left out: msgspec leaves them to the class."""
        if len(self.__dict__) < len(self.__dataclass_fields__):
            held = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
            self.__dict__.update(held)

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
        return self.value is not None

    @property
    def is_double(self) -> bool:
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


# --- what a soak asks of a run ------------------------------------------------------------------

# by          amount                      the run ends
# steps       steps                       after so many, as any run
# replays     launches of its graphs      once every rank has made so many
# duration    seconds of training         once rank 0 has trained so long
#
# By replays and by duration a run takes `steps` of its configuration at least, and as many as one
# turn of every stressor has; it ends on all ranks at the same step, a multiple of `flush_every`.
DEFAULT_STALL_S = 300.0
LEAST_STEPS, LEAST_QUARTERED = 64, 8
"""Fewest steps of a soak and of `max_growth_bytes` (`harness.checks.memory`)."""
ALWAYS_ON = ("races",)
"""Stressors that take no turns: who watches the order of accesses must not look away."""
SoakBy = Literal["steps", "replays", "duration"]


@dataclass(frozen=True, kw_only=True)
class SoakSpec(Json):
    """How a run is soaked.

    Attributes:
        by: what `amount` counts: steps, replays or seconds.
        turn_steps: steps until the next stressor's turn; 0: all are at work at all times.
        stall_s: seconds without a record of any rank after which the run counts as hung.
    """

    by: SoakBy
    amount: float
    turn_steps: int = 0
    stall_s: float = DEFAULT_STALL_S

    def __post_init__(self) -> None:
        super().__post_init__()
        # As in `RunSpec`: an int would give another key than the same value read from JSON.
        for name in ("amount", "stall_s"):
            value = float(getattr(self, name))
            if not 0 < value < float("inf"):
                raise RecordError(f"{name}: expected a number > 0, got {value!r}")
            object.__setattr__(self, name, value)

    @property
    def is_open(self) -> bool:
        """Whether the number of steps is known only when the run ends."""
        return self.by != "steps"

    @property
    def asked(self) -> str:
        return f"{self.amount:g} s of training" if self.by == "duration" \
            else f"{self.amount:.0f} {self.by}"  # fmt: skip


def taking_turns(names: Sequence[str]) -> list[str]:
    """Those of some stressors that are at work one at a time."""
    return [name for name in names if name not in ALWAYS_ON]


def turn_of(names: Sequence[str], seed: int, number: int) -> tuple[str, ...]:
    """Who is at work in turn `number`: one stressor, and those that always are.

    Each has one turn a cycle; the order is drawn anew every cycle, the same on all ranks.
    """
    turning = taking_turns(names)
    always = tuple(name for name in names if name in ALWAYS_ON)
    if not turning:
        return always
    cycle, place = divmod(number, len(turning))
    # Text seeds Python's generator by its SHA-512: the same everywhere.
    random.Random(f"{seed}/{cycle}").shuffle(turning)
    return (turning[place], *always)


# --- what `compare.expect` states in place of `bitwise`, for arithmetic that differs --------------

# {rtol: R, atol: A,        every loss, microbatch loss and gradient norm of every step and rank:
#                           |candidate - reference| <= A + R * |reference|
#  gradients: F}            also each parameter's gradient in the first step of a user's program:
#                           |candidate - reference| <= F * |reference|, 0.25 if it is not stated
#                           (`harness.checks.gradients`)
# {loss_gap: G, over: N}    the mean loss of the last N steps: |candidate - reference| <= G
# rounding                  as far as rounding alone takes the reference, which is measured
#                           (`harness.checks.bits`)
#
# The bounds themselves are within; NaN, infinity and a missing value are within no tolerance. The
# mean is over steps and ranks that record a loss. The control is judged bit for bit all the same;
# `state` and `taps` then say what differs and demand nothing.
Expect = Literal["bitwise", "rounding"] | dict[str, float]
ROUNDING: Literal["rounding"] = "rounding"
FORMS = (("rtol", "atol", "gradients"), ("loss_gap", "over"))
"""Keys of each form; of the first all but one of rtol and atol may be left out."""
GRADIENTS = 0.25


@dataclass(frozen=True)
class Close:
    """Relative and absolute bounds, both >= 0 and not both 0."""

    rtol: float
    atol: float
    gradients: float = GRADIENTS

    def __str__(self) -> str:
        return f"rtol {self.rtol:g} and atol {self.atol:g}"

    def excess(self, _: object, reference: float, candidate: float) -> float:
        """The gap in units of what is allowed; infinite if it is no number, or none is allowed."""
        gap = abs(candidate - reference)
        if not math.isfinite(gap):
            return math.inf
        allowed = self.atol + self.rtol * abs(reference)
        return gap / allowed if allowed else (math.inf if gap else 0.0)


@dataclass(frozen=True)
class LossGap:
    """The bound on the means, > 0, and the number of steps that they are over, >= 1."""

    loss_gap: float
    over: int


@dataclass(frozen=True)
class Rounding:
    """What rounding does, by measurement."""

    def __str__(self) -> str:
        return "the bounds of rounding"


class ToleranceError(RecordError):
    """What is stated is no tolerance."""

    def __init__(self, key: str, expected: str, got: object) -> None:
        super().__init__(f"{key}: expected {expected}, got {got}")
        self.key, self.expected, self.got = key, expected, str(got)


def tolerance_of(expect: Expect, key: str = "expect") -> Close | LossGap | Rounding | None:
    """The tolerance that is stated, in errors as `key`; None for `bitwise`.

    Raises:
        ToleranceError: keys of no form, or a bound that is none.
    """
    if not isinstance(expect, Mapping):
        return Rounding() if expect == ROUNDING else None
    is_close = bool(expect) and set(expect) <= set(FORMS[0])
    if not is_close and set(expect) != set(FORMS[1]):
        got = ", ".join(expect) or "an empty mapping"
        raise ToleranceError(key, "rtol and atol, or both loss_gap and over", got)
    for name, value in expect.items():
        least = ">= 0" if is_close else "> 0"
        if not (math.isfinite(value) and value >= 0 and (is_close or value)):
            raise ToleranceError(f"{key}.{name}", f"a number {least}", value)
    if is_close and not (expect.get("rtol") or expect.get("atol")):
        raise ToleranceError(key, "rtol or atol above 0", "0: say bitwise")
    if is_close:
        gradients = expect.get("gradients", GRADIENTS)
        return Close(expect.get("rtol", 0.0), expect.get("atol", 0.0), gradients)
    if not float(expect["over"]).is_integer():
        raise ToleranceError(f"{key}.over", "an integer >= 1", expect["over"])
    return LossGap(expect["loss_gap"], int(expect["over"]))
