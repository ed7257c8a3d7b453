"""How far apart rounding may put a reference and a candidate: bounds out of runs that were made.

Runs X_1 ... X_n of the reference round at random (`harness.samples`): operators in float64, each
result up or down with mean zero. Of one value (a loss, a norm) at one step and rank:

1. Errors are sums over many small independent roundings, hence nearly normal, with mean zero to
   first order (N. J. Higham and T. Mary, SIAM J. Sci. Comput. 41, 2019). A result at a random place
   between two numbers, a gap h apart, has h^2/6 as the variance of its random rounding and h^2/12
   of its nearest one: samples spread by sqrt(2) more than programs that round to nearest, the
   reference and a right candidate.
2. With s the standard deviation of the samples, (candidate - reference) / (sqrt(2) s) and
   (reference - mean X) / (sqrt(1 + 1/n) s) are therefore no wider than Student's t with n - 1
   degrees of freedom; six samples make that tail, and not a normal one, the right one.
3. Of N values both are asked of each. A factor t that is exceeded with probability P / 2N bounds
   the probability that any of these questions goes wrong by P (Bonferroni: whatever depends on
   whatever, as steps do on the ones before): `FALSE_ALARM` for a whole case.
4. s may only grow: for a kind of value (loss, microbatch losses, norm) the largest of all ranks and
   of all steps so far counts, as errors in weights stay. That widens bounds, so 3 holds.
5. Numbers have gaps: where s is below them, samples may be equal by luck. `FLOOR_ROUNDINGS` unit
   roundoffs of the value are allowed in any case: of bfloat16 or float16 where all values of the
   kind are such numbers, else of float32.

    bound(value) = t sqrt(2) s + FLOOR_ROUNDINGS u |reference|

A reference that lies outside of its own samples (2) did not do what they did, as where a program
draws other numbers or is cut off by underflow: there is no bound, which is an error. Samples whose
bits all equal the reference's round nothing: then bits are due.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.checks import environment
from harness.checks.complete import find_flaw
from harness.checks.evidence import show_float, step_table
from harness.checks.exact import quantities
from harness.records import FloatBits, RunResult, What

FALSE_ALARM = 1e-4
"""Of a case: the most that a right program fails with, or has no verdict."""
FLOOR_ROUNDINGS = 8
_LEAST_PATTERNS = 8
"""Fewer numbers may end in zeros by chance."""
_ROUNDOFF = ((0xFFFF, 2.0**-8), (0x1FFF, 2.0**-11))
"""Bits of a float32 that bfloat16 and float16 lack, and their unit roundoffs."""
Place = tuple[int, int, str]
"""Step, rank, quantity."""


class Unmeasured(Exception):
    """The samples give no bound; `what` says why."""

    def __init__(self, what: What, message: str) -> None:
        super().__init__(message)
        self.what: What = what


@dataclass(frozen=True, kw_only=True)
class Spread:
    """What rounding may do to each value.

    Attributes:
        factor: t, the standard deviations that are allowed.
        deviations: by step and kind, the largest so far.
        roundoffs: unit roundoff by kind.
    """

    factor: float
    deviations: dict[tuple[int, str], float]
    roundoffs: dict[str, float]

    def excess(self, place: Place, reference: float, candidate: float) -> float:
        """The gap in units of its bound; infinite for a NaN or an infinity."""
        gap = abs(candidate - reference)
        return _in_units(gap, self._bound(place, reference, math.sqrt(2)))

    def off_its_samples(self, place: Place, reference: float, samples: Sequence[float]) -> float:
        """How far the reference is from the mean of its samples, in units of what it may be."""
        gap = abs(reference - math.fsum(samples) / len(samples))
        return _in_units(gap, self._bound(place, reference, math.sqrt(1 + 1 / len(samples))))

    def _bound(self, place: Place, reference: float, runs: float) -> float:
        step, _, name = place
        kind = kind_of(name)
        floor = FLOOR_ROUNDINGS * self.roundoffs[kind] * abs(reference)
        return self.factor * runs * self.deviations[step, kind] + floor


def measure(reference: RunResult, samples: Sequence[RunResult]) -> Spread | None:
    """The bounds of a reference's values; None if no sample has rounded anything.

    Args:
        reference: the run.
        samples: at least two runs of it that round at random.

    Raises:
        Unmeasured: a sample is not whole, lacks a value, or has one that is no number; or the
            reference is none of what the samples are.
    """
    ours = _values(reference)
    if not ours:
        raise Unmeasured("not_run", "the reference recorded no loss or norm: nothing to compare")
    tables = [_of_sample(reference, run, number, ours) for number, run in enumerate(samples, 1)]
    if all(table[place].bits == ours[place].bits for table in tables for place in ours):
        return None
    numbers = {place: [float(table[place].value or 0) for table in tables] for place in ours}
    deviations: dict[tuple[int, str], float] = {}
    largest: dict[str, float] = {}
    for place in sorted(ours, key=lambda each: each[0]):
        kind = kind_of(place[2])
        largest[kind] = max(largest.get(kind, 0.0), float(np.std(numbers[place], ddof=1)))
        deviations[place[0], kind] = largest[kind]
    found = Spread(
        factor=quantile(FALSE_ALARM / (2 * len(ours)), len(samples) - 1),
        deviations=deviations,
        roundoffs={
            kind: _roundoff(
                table[place] for table in (ours, *tables) for place in ours
                if kind_of(place[2]) == kind
            )
            for kind in largest
        },
    )  # fmt: skip
    _refuse_other_work(found, ours, numbers)
    return found


def kind_of(quantity: str) -> str:
    """`loss`, `microbatch_losses` or `grad_norm`."""
    return quantity.partition("[")[0]


@functools.cache
def quantile(probability: float, freedom: int) -> float:
    """The value that |T| exceeds with a probability; T is Student's, of odd degrees of freedom.

    Its tail is 1 - 2/pi (a + sin a cos a (1 + 2/3 cos^2 a (1 + 4/5 cos^2 a (...)))), with
    tan a = t / sqrt(degrees of freedom).
    """
    if freedom % 2 == 0:
        raise ValueError(f"Expected odd degrees of freedom, got {freedom}.")
    low, high = 0.0, math.pi / 2  # of the angle
    for _ in range(200):
        angle = (low + high) / 2
        square, series = math.cos(angle) ** 2, 0.0
        for power in range(freedom - 1, 1, -2):
            series = 1 + (power / (power + 1) * square * series if power < freedom - 1 else 0.0)
        tail = 1 - 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * series)
        low, high = (angle, high) if tail > probability else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def _values(run: RunResult) -> dict[Place, FloatBits]:
    return {
        (step, rank, name): value
        for (step, rank), record in step_table(run).items()
        for name, value in quantities(record)
    }


def _of_sample(
    reference: RunResult, run: RunResult, number: int, ours: dict[Place, FloatBits]
) -> dict[Place, FloatBits]:
    name = f"sample {number} of rounding (run {run.spec.key})"
    if (flaw := find_flaw(run)) is not None:
        raise Unmeasured(flaw.what, f"{name} is not whole: {flaw.message}")
    alike = environment.check(reference, run, f"sample {number}")
    if alike.outcome != "passed":
        raise Unmeasured(alike.what, alike.message)
    found = _values(run)
    for (step, rank, quantity), value in ours.items():
        theirs = found.get((step, rank, quantity))
        where = f"{quantity} at step {step} on rank {rank}"
        if theirs is None:
            raise Unmeasured("not_run", f"{name} recorded no {where}")
        if value.value is not None and theirs.value is None:
            message = f"{name} has {show_float(theirs)} as {where}, the reference a number"
            raise Unmeasured("unsupported", message)
    return found


def _roundoff(values: Iterable[FloatBits]) -> float:
    patterns = {int(value.bits, 16) for value in values}
    if len(patterns) >= _LEAST_PATTERNS:
        for lacking, roundoff in _ROUNDOFF:
            if not any(pattern & lacking for pattern in patterns):
                return roundoff
    return 2.0**-24


def _refuse_other_work(
    spread: Spread, ours: dict[Place, FloatBits], numbers: dict[Place, list[float]]
) -> None:
    for place in sorted(ours):
        value = ours[place].value
        if value is None:
            continue  # is within nothing, whatever the bound
        units = spread.off_its_samples(place, value, numbers[place])
        if not units <= 1:
            step, rank, quantity = place
            raise Unmeasured(
                "unsupported",
                f"the reference is not what its samples of rounding are: its {quantity} at step "
                f"{step} on rank {rank}, {show_float(ours[place])}, is off their mean by "
                f"{units:.3g} times what rounding explains; a program that draws random numbers "
                f"from what it computes, or whose updates are lost to rounding, has no such bound",
            )


def _in_units(gap: float, bound: float) -> float:
    if not math.isfinite(gap):
        return math.inf
    return gap / bound if bound else (math.inf if gap else 0.0)
