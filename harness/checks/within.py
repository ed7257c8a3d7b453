"""Losses and gradient norms within a stated tolerance (`harness.tolerance`), per step and rank.

It answers in place of `loss` where `compare.expect` is no `bitwise`. The largest gap and its place
are told in either case. Checks of digests are informative then: they count what differs.

How far rounding may put a candidate is measured (`rounding`): runs X_1 ... X_n of the reference
round at random (`harness.samples`), each result of an operator up or down with mean zero. Of one
value (a loss, a norm) at one step and rank:

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
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.checks import exact
from harness.checks.complete import find_flaw
from harness.checks.environment import alike
from harness.checks.evidence import (
    Runs,
    StepTable,
    count,
    error,
    failed,
    passed,
    shared_pairs,
    show_float,
    step_table,
    where,
)
from harness.records import CheckResult, Difference, FloatBits, RunResult, What
from harness.samples import samples_of
from harness.tolerance import Close, LossGap, tolerance_of

FALSE_ALARM = 1e-4
"""Of a case: the most that a right program fails with, or has no verdict."""
FLOOR_ROUNDINGS = 8
_LEAST_PATTERNS = 8
"""Fewer numbers may end in zeros by chance."""
_ROUNDOFF = ((0xFFFF, 2.0**-8), (0x1FFF, 2.0**-11))
"""Bits of a float32 that bfloat16 and float16 lack, and their unit roundoffs."""
Place = tuple[int, int, str]
"""Step, rank, quantity."""
_Values = Mapping[Place, FloatBits]
_Gap = tuple[Place, FloatBits | None, FloatBits | None]


def loss(runs: Runs) -> CheckResult:
    """Losses of reference and candidate, by bits or within the case's tolerance."""
    tolerance = tolerance_of(runs.case.expect)
    if tolerance is None:
        return exact.loss(runs.reference, runs.candidate)
    ours, theirs = step_table(runs.reference), step_table(runs.candidate)
    if isinstance(tolerance, LossGap):
        return _loss_gap(ours, theirs, tolerance)
    left, right = _values(runs.reference), _values(runs.candidate)
    pairs = set(shared_pairs(ours, theirs))
    both = [(at, left.get(at), right.get(at)) for at in left | right if at[:2] in pairs]
    if not both:
        message = "the runs share no recorded loss or norm: nothing to compare"
        return error("loss", "not_run", message)
    if isinstance(tolerance, Close):
        return _close(both, str(tolerance), lambda _, a, b: tolerance.excess(a, b))
    try:
        return _rounding(runs, both, str(tolerance))
    except Unmeasured as why:
        return error("loss", why.what, str(why))


def _rounding(runs: Runs, values: Sequence[_Gap], tolerance: str) -> CheckResult:
    due = [spec.key for spec in samples_of(runs.case)]
    if [run.spec.key for run in runs.samples] != due:
        raise Unmeasured("not_run", f"expected the {len(due)} samples of the reference")
    spread = measure(runs.reference, runs.samples)
    if spread is None:
        result = exact.loss(runs.reference, runs.candidate)
        message = f"no sample has rounded anything, so bits are due: {result.message}"
        return replace(result, message=message)
    result = _close(values, tolerance, spread.excess)
    figures = result.figures | {"samples": float(len(due)), "deviations": spread.factor}
    return replace(result, figures=figures)


def informative(result: CheckResult) -> CheckResult:
    """A check of digests under a tolerance: it says what differs and demands nothing."""
    if result.outcome != "failed":
        return result
    message = f"not demanded within a tolerance: {result.message}"
    return replace(result, outcome="passed", what="", message=message)


def _close(
    values: Sequence[_Gap], tolerance: str, excess: Callable[[Place, float, float], float]
) -> CheckResult:
    gaps = [(excess(at, _number(a), _number(b)), at, a, b) for at, a, b in values]
    # Equal infinities are still outside: `finite` says so, too.
    beyond = [gap for gap in gaps if not gap[0] <= 1]
    largest = max(gaps, key=lambda gap: (gap[0], -gap[1][0], -gap[1][1]))
    (step, rank, name), left, right = largest[1:]
    told = (
        f"the largest gap is {largest[0]:.3g} times (step {step}, rank {rank}, {name}: "
        f"{show_float(left)} and {show_float(right)}) of what {tolerance} allow"
    )
    figures = {"values": float(len(gaps)), "beyond": float(len(beyond))}
    if math.isfinite(largest[0]):
        figures["largest_gap"] = largest[0]
    number = count(len(gaps), "value")
    if not beyond:
        message = f"{number} of losses and norms within {tolerance}; {told}"
        return passed("loss", message, **figures)
    _, at, left, right = min(beyond, key=lambda gap: gap[1][:2])
    found = _difference(at, left, right)
    message = f"{at[2]} is beyond {tolerance} first {where(found)}; {len(beyond)} of {number} are"
    return failed("loss", "diverged", f"{message}; {told}", found, **figures)


def _loss_gap(ours: StepTable, theirs: StepTable, tolerance: LossGap) -> CheckResult:
    steps = sorted({step for step, _ in (*ours, *theirs)})
    if len(steps) < tolerance.over:
        message = f"the runs have {count(len(steps), 'step')}, the tolerance is {tolerance}"
        return error("loss", "unsupported", message)
    last = set(steps[-tolerance.over :])
    keys = sorted(key for key in {*ours, *theirs} if key[0] in last)
    both: list[_Gap] = [
        ((*key, "loss"), _loss_of(ours, key), _loss_of(theirs, key)) for key in keys
    ]
    # A rank that records no loss in either run, as in a pipeline, has no part in the mean.
    values = [each for each in both if each[1:] != (None, None)]
    if not values:
        return error("loss", "not_run", "the runs recorded no loss there: nothing to compare")
    for at, left, right in values:
        if not (math.isfinite(_number(left)) and math.isfinite(_number(right))):
            found = _difference(at, left, right)
            message = f"the loss is no number in both runs, {where(found)}"
            return failed("loss", "diverged", message, found)
    mean_a = math.fsum(_number(left) for _, left, _ in values) / len(values)
    mean_b = math.fsum(_number(right) for *_, right in values) / len(values)
    gap = abs(mean_b - mean_a)
    at, left, right = max(values, key=lambda each: abs(_number(each[2]) - _number(each[1])))
    message = (
        f"the mean loss of the last {count(tolerance.over, 'step')} is {mean_a:.9g} in the "
        f"reference and {mean_b:.9g} in the candidate, {gap:.3g} apart where "
        f"{tolerance.loss_gap:g} is allowed; the largest gap of one step is "
        f"{abs(_number(right) - _number(left)):.3g}, at step {at[0]} on rank {at[1]}"
    )
    figures = {"reference_mean": mean_a, "candidate_mean": mean_b, "gap": gap}
    if gap <= tolerance.loss_gap:
        return passed("loss", message, **figures)
    return failed("loss", "diverged", message, _difference(at, left, right), **figures)


def _loss_of(table: StepTable, key: tuple[int, int]) -> FloatBits | None:
    return table[key].loss if key in table else None


def _difference(at: Place, left: FloatBits | None, right: FloatBits | None) -> Difference:
    step, rank, name = at
    return Difference(
        step=step, rank=rank, quantity=name,
        reference=show_float(left), candidate=show_float(right),
    )  # fmt: skip


def _number(value: FloatBits | None) -> float:
    """As a float; NaN where there is none, so that it is within nothing."""
    return math.nan if value is None or value.value is None else value.value


def _values(run: RunResult) -> dict[Place, FloatBits]:
    return {
        (step, rank, name): value
        for (step, rank), record in step_table(run).items()
        for name, value in exact.quantities(record)
    }


# --- the bounds of rounding -------------------------------------------------------------------


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
    deviations: Mapping[tuple[int, str], float]
    roundoffs: Mapping[str, float]

    def excess(
        self, place: Place, reference: float, other: float, runs: float = math.sqrt(2)
    ) -> float:
        """The gap in units of its bound; infinite for a NaN or an infinity.

        Args:
            runs: standard deviations of the gap in those of a sample.
        """
        gap, kind = abs(other - reference), kind_of(place[2])
        if not math.isfinite(gap):
            return math.inf
        floor = FLOOR_ROUNDINGS * self.roundoffs[kind] * abs(reference)
        bound = self.factor * runs * self.deviations[place[0], kind] + floor
        return gap / bound if bound else (math.inf if gap else 0.0)


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
    patterns: dict[str, set[int]] = {}
    for place in sorted(ours, key=lambda each: each[0]):
        kind = kind_of(place[2])
        largest[kind] = max(largest.get(kind, 0.0), statistics.stdev(numbers[place]))
        deviations[place[0], kind] = largest[kind]
        held = patterns.setdefault(kind, set())
        held.update(int(table[place].bits, 16) for table in (ours, *tables))
    found = Spread(
        factor=quantile(FALSE_ALARM / (2 * len(ours)), len(samples) - 1),
        deviations=deviations,
        roundoffs={kind: _roundoff(held) for kind, held in patterns.items()},
    )
    _refuse_other_work(found, ours, numbers)
    return found


def kind_of(quantity: str) -> str:
    """`loss`, `microbatch_losses` or `grad_norm`."""
    return quantity.partition("[")[0]


@functools.cache
def quantile(probability: float, freedom: int) -> float:
    """The value that |T| exceeds with a probability; T is Student's, of whole degrees of freedom.

    The distribution is a finite sum in the angle a, tan a = t / sqrt(degrees of freedom)
    (Abramowitz and Stegun, Handbook of Mathematical Functions, 1964, 26.7.3 and 26.7.4).
    """
    odd = freedom % 2
    low, high = 0.0, math.pi / 2  # of the angle
    for _ in range(200):
        angle = (low + high) / 2
        sine, cosine = math.sin(angle), math.cos(angle)
        term, total = cosine if odd else 1.0, 0.0
        for place in range(1, (freedom - odd) // 2 + 1):
            total += term
            term *= cosine * cosine * (2 * place - 1 + odd) / (2 * place + odd)
        tail = 1 - (2 / math.pi * (angle + sine * total) if odd else sine * total)
        low, high = (angle, high) if tail > probability else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def _of_sample(reference: RunResult, run: RunResult, number: int, ours: _Values) -> _Values:
    name = f"sample {number} of rounding (run {run.spec.key})"
    if (flaw := find_flaw(run)) is not None:
        raise Unmeasured(flaw.what, f"{name} is not whole: {flaw.message}")
    same = alike(reference, run, f"sample {number}")
    if same.outcome != "passed":
        raise Unmeasured(same.what, same.message)
    found = _values(run)
    for place, value in ours.items():
        theirs = found.get(place)
        at = "{2} at step {0} on rank {1}".format(*place)
        if theirs is None:
            raise Unmeasured("not_run", f"{name} recorded no {at}")
        if value.value is not None and theirs.value is None:
            message = f"{name} has {show_float(theirs)} as {at}, the reference a number"
            raise Unmeasured("unsupported", message)
    return found


def _roundoff(patterns: set[int]) -> float:
    if len(patterns) >= _LEAST_PATTERNS:
        for lacking, roundoff in _ROUNDOFF:
            if not any(pattern & lacking for pattern in patterns):
                return roundoff
    return 2.0**-24


def _refuse_other_work(
    spread: Spread, ours: _Values, numbers: Mapping[Place, Sequence[float]]
) -> None:
    for place in sorted(ours):
        value, samples = ours[place].value, numbers[place]
        if value is None:
            continue  # is within nothing, whatever the bound
        mean = math.fsum(samples) / len(samples)
        units = spread.excess(place, value, mean, math.sqrt(1 + 1 / len(samples)))
        if not units <= 1:
            step, rank, quantity = place
            raise Unmeasured(
                "unsupported",
                f"the reference is not what its samples of rounding are: its {quantity} at step "
                f"{step} on rank {rank}, {show_float(ours[place])}, is off their mean by "
                f"{units:.3g} times what rounding explains; a program that draws random numbers "
                f"from what it computes, or whose updates are lost to rounding, has no such bound",
            )
