"""Losses and gradient norms, by bits or within a stated tolerance (`harness.tolerance`).

The largest gap and its place are told in either case. Within a tolerance, checks of digests are
informative: they count what differs.

How far `rounding` may put a candidate is measured by n runs of the reference that round at random
(`harness.repeats`), each result of an operator up or down with mean zero. Of one value (a loss, a
norm) at one step and rank:

1. Errors are sums over many small independent roundings, hence nearly normal, with mean zero to
   first order (N. J. Higham and T. Mary, SIAM J. Sci. Comput. 41, 2019). Random rounding has twice
   the variance of rounding to nearest (h^2/6 and h^2/12 of a gap h), as in both programs.
2. With s the standard deviation of the samples, (candidate - reference) / (sqrt(2) s) and
   (reference - their mean) / (sqrt(1 + 1/n) s) are no wider than Student's t with n - 1 degrees.
3. A factor t that is exceeded with probability P / 2N bounds the probability that any of both
   questions on N values goes wrong by P = `FALSE_ALARM` (Bonferroni).
4. s may only grow: for a kind of value the largest of all ranks and of all steps so far counts.
5. `FLOOR_ROUNDINGS` unit roundoffs of the value are allowed in any case: of bfloat16 or float16
   where all values of the kind are such numbers, else of float32.

    bound(value) = t sqrt(2) s + FLOOR_ROUNDINGS u |reference|

A reference outside of its own samples did not do what they did, as where a program draws other
numbers: there is no bound, which is an error. Samples whose bits all equal the reference's round
nothing: then bits are due.
"""

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.checks import check
from harness.checks.complete import find_flaw
from harness.checks.evidence import (
    Options,
    Runs,
    alike,
    count,
    error,
    failed,
    judged,
    of_pairs,
    passed,
    shared_pairs,
    show_float,
    show_ranks,
    step_table,
    where,
)
from harness.checks.exact import quantities
from harness.records import CheckResult, Difference, FloatBits, RunResult, What, ulp_distance
from harness.repeats import samples_of
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


@check(
    "loss", "bits of losses and gradient norm, or within the tolerance of `compare.expect`",
    compares=True,
)  # fmt: skip
def within(runs: Runs, _: Options) -> CheckResult:
    """Losses of reference and candidate, by bits or within the case's tolerance."""
    tolerance = tolerance_of(runs.case.expect)
    if tolerance is None:
        return loss(runs.reference, runs.candidate)
    if isinstance(tolerance, LossGap):
        return _loss_gap(runs.reference, runs.candidate, tolerance)
    if isinstance(tolerance, Close):
        excess = tolerance.excess
        return _compared(runs, str(tolerance), lambda _, a, b: excess(_number(a), _number(b)))
    try:
        return _rounding(runs, str(tolerance))
    except Unmeasured as why:
        return error("loss", why.what, str(why))


def loss(reference: RunResult, candidate: RunResult) -> CheckResult:
    """Compare the bits of every loss, microbatch loss and gradient norm that a run holds."""
    return _compare(reference, candidate, "", lambda _, a, b: 0.0 if _same(a, b) else math.inf)


def _same(left: FloatBits | None, right: FloatBits | None) -> bool:
    return left is not None and right is not None and left.bits == right.bits


def _rounding(runs: Runs, tolerance: str) -> CheckResult:
    due = [spec.key for spec in samples_of(runs.case)]
    if [run.spec.key for run in runs.samples] != due:
        raise Unmeasured("not_run", f"expected the {len(due)} samples of the reference")
    spread = measure(runs.reference, runs.samples)
    if spread is None:
        result = loss(runs.reference, runs.candidate)
        message = f"no sample has rounded anything, so bits are due: {result.message}"
        return replace(result, message=message)
    excess = spread.excess
    result = _compared(runs, tolerance, lambda at, a, b: excess(at, _number(a), _number(b)))
    figures = result.figures | {"samples": float(len(due)), "deviations": spread.factor}
    return replace(result, figures=figures)


Excess = Callable[[Place, FloatBits | None, FloatBits | None], float]
"""A gap in units of what is allowed: above 1 it is beyond."""


def _compared(runs: Runs, tolerance: str, excess: Excess) -> CheckResult:
    return _compare(runs.reference, runs.candidate, tolerance, excess)


def informative(result: CheckResult) -> CheckResult:
    """A check of digests under a tolerance: it says what differs and demands nothing."""
    if result.outcome != "failed":
        return result
    message = f"not demanded within a tolerance: {result.message}"
    return replace(result, outcome="passed", what="", message=message)


def _compare(
    reference: RunResult, candidate: RunResult, tolerance: str, excess: Excess
) -> CheckResult:
    """Every value of the pairs that both runs hold; `tolerance` in words, "" for bits."""
    pairs = set(shared_pairs(step_table(reference), step_table(candidate)))
    left, right = _values(reference), _values(candidate)
    both = [(at, left.get(at), right.get(at)) for at in left | right if at[:2] in pairs]
    if not both:
        message = "the runs share no recorded loss or norm: nothing to compare"
        return error("loss", "not_run", message)
    gaps = [(excess(*each), *each) for each in both]
    # Equal infinities are outside of a tolerance: `finite` says so, too.
    beyond = [gap for gap in gaps if not gap[0] <= 1]
    differing = {gap[1][:2] for gap in beyond}
    figures: dict[str, float] = {
        "pairs": len(pairs), "differing_pairs": len(differing), "values": len(gaps),
        "beyond": len(beyond),
    }  # fmt: skip
    size, (step, rank, name), a, b = max(gaps, key=lambda gap: (gap[0], -gap[1][0], -gap[1][1]))
    told = ""
    if tolerance:
        figures |= {"largest_gap": size} if math.isfinite(size) else {}
        told = f"; the largest gap is {size:.3g} times (step {step}, rank {rank}, {name}: "
        told += f"{show_float(a)} and {show_float(b)}) of what {tolerance} allow"
    if not beyond:
        how = f"within {tolerance}" if tolerance else "equal bit for bit"
        message = f"{count(len(gaps), 'value')} of losses and norms {how} in "
        message += count(len(pairs), "(step, rank) pair")
        return passed("loss", message + told, **figures)
    _, at, a, b = min(beyond, key=_order)
    found = _difference(at, a, b)
    message = f"{at[2]} is beyond {tolerance} first {where(found)}"
    if not tolerance:
        found = replace(found, ulps=None if a is None or b is None else ulp_distance(a, b))
        apart = "" if found.ulps is None else f", {count(found.ulps, 'ulp')} apart"
        apart = ", the sign of a zero" if found.ulps == 0 else apart
        message = f"{at[2]} differs first {where(found)}{apart}"
    ranks = show_ranks({rank for _, rank in differing})
    message += f"; {len(beyond)} of {count(len(gaps), 'value')} are, in "
    message += f"{of_pairs(len(differing), len(pairs))}, on {ranks}"
    return failed("loss", "diverged", message + told, found, **figures)


def _order(gap: tuple[float, Place, FloatBits | None, FloatBits | None]) -> tuple[object, ...]:
    """At the lowest step a loss comes before the gradient norm, then the lowest rank."""
    step, rank, name = gap[1]
    return (step, name == "grad_norm", name != "loss", len(name), name, rank)


def _loss_gap(reference: RunResult, candidate: RunResult, tolerance: LossGap) -> CheckResult:
    ours, theirs = _values(reference), _values(candidate)
    steps = sorted({step for run in (reference, candidate) for step, _ in step_table(run)})
    if len(steps) < tolerance.over:
        message = f"the runs have {count(len(steps), 'step')}, the tolerance is {tolerance}"
        return error("loss", "unsupported", message)
    last = steps[-tolerance.over :]
    # A rank that records no loss in either run, as in a pipeline, has no part in the mean.
    places = sorted(at for at in {*ours, *theirs} if at[0] in last and at[2] == "loss")
    values: list[_Gap] = [(at, ours.get(at), theirs.get(at)) for at in places]
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
    ok = gap <= tolerance.loss_gap
    result = judged(
        "loss", "diverged", message, ok=ok, reference_mean=mean_a, candidate_mean=mean_b, gap=gap
    )
    return result if ok else replace(result, difference=_difference(at, left, right))


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
        for name, value in quantities(record)
    }


# --- the bounds of rounding -------------------------------------------------------------------


class Unmeasured(Exception):
    """The samples give no bound; `what` says why."""

    def __init__(self, what: What, message: str) -> None:
        super().__init__(message)
        self.what: What = what


@dataclass(frozen=True, kw_only=True)
class Spread:
    """What rounding may do to each value: `factor` standard deviations of its step and kind.

    Attributes:
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
        factor=quantile(FALSE_ALARM / (2 * len(ours)), len(samples) - 1), deviations=deviations,
        roundoffs={kind: _roundoff(held) for kind, held in patterns.items()},
    )  # fmt: skip
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
    odd, low, high = freedom % 2, 0.0, math.pi / 2  # of the angle
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
