"""What `compare.expect` states in place of `bitwise`: a tolerance, for arithmetic that differs.

    {rtol: R, atol: A}        every loss, microbatch loss and gradient norm of every step and rank:
                              |candidate - reference| <= A + R * |reference|
    {loss_gap: G, over: N}    the mean loss of the last N steps: |candidate - reference| <= G
    rounding                  as far as rounding alone takes the reference, which is measured
                              (`harness.checks.within`)

Values are float32 as recorded and compared in float64; the bounds themselves are within. NaN and
infinity are within no tolerance, not even of themselves, and a missing value differs. The mean is
over steps and ranks, of what each rank that records a loss has as its loss of the step. The control
is judged bit for bit all the same; `state` and `taps` then say what differs and demand nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from harness.codec import RecordError

Expect = Literal["bitwise", "rounding"] | dict[str, float]
ROUNDING: Literal["rounding"] = "rounding"
FORMS = (("rtol", "atol"), ("loss_gap", "over"))
"""Keys of each form; of the first one may be left out, which is 0."""


@dataclass(frozen=True)
class Close:
    """Relative and absolute bounds, both >= 0 and not both 0."""

    rtol: float
    atol: float

    def __str__(self) -> str:
        return f"rtol {self.rtol:g} and atol {self.atol:g}"

    def excess(self, reference: float, candidate: float) -> float:
        """The gap in units of what is allowed, 1 at the bound; NaN and infinity are infinitely far.

        Where nothing is allowed, as of a reference of 0 without `atol`, any gap is, too.
        """
        gap = abs(candidate - reference)
        if not math.isfinite(gap):
            return math.inf
        allowed = self.atol + self.rtol * abs(reference)
        if allowed:
            return gap / allowed
        return math.inf if gap else 0.0


@dataclass(frozen=True)
class LossGap:
    """The bound on the means, > 0, and the number of steps that they are over, >= 1."""

    loss_gap: float
    over: int

    def __str__(self) -> str:
        return f"{self.loss_gap:g} over {self.over} steps"


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
    form = next((form for form in FORMS if expect and set(expect) <= set(form)), None)
    if form is None or (form == FORMS[1] and set(expect) != set(form)):
        got = ", ".join(expect) or "an empty mapping"
        raise ToleranceError(key, "rtol and atol, or both loss_gap and over", got)
    for name, value in expect.items():
        if not (math.isfinite(value) and value >= 0):
            raise ToleranceError(f"{key}.{name}", "a number >= 0", value)
    if form == FORMS[0]:
        if not any(expect.values()):
            raise ToleranceError(key, "rtol or atol above 0", "0: say bitwise")
        return Close(expect.get("rtol", 0.0), expect.get("atol", 0.0))
    if not expect["loss_gap"]:
        raise ToleranceError(f"{key}.loss_gap", "a number > 0", 0)
    if not float(expect["over"]).is_integer() or not expect["over"]:
        raise ToleranceError(f"{key}.over", "an integer >= 1", expect["over"])
    return LossGap(expect["loss_gap"], int(expect["over"]))
