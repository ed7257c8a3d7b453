"""What `compare.expect` states in place of `bitwise`: a tolerance, for arithmetic that differs.

    {rtol: R, atol: A,        every loss, microbatch loss and gradient norm of every step and rank:
                              |candidate - reference| <= A + R * |reference|
     gradients: F}            also each parameter's gradient in the first step of a user's program:
                              |candidate - reference| <= F * |reference|, 0.25 if it is not stated
                              (`harness.checks.gradients`)
    {loss_gap: G, over: N}    the mean loss of the last N steps: |candidate - reference| <= G
    rounding                  as far as rounding alone takes the reference, which is measured
                              (`harness.checks.bits`)

The bounds themselves are within; NaN, infinity and a missing value are within no tolerance. The
mean is over steps and ranks that record a loss. The control is judged bit for bit all the same;
`state` and `taps` then say what differs and demand nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from harness.codec import RecordError

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
