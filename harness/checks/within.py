"""Losses and gradient norms, by bits or within a stated tolerance (`harness.tolerance`).

The bound of `rounding` is measured: docs/ARCHITECTURE.md derives it. With s the standard deviation
of the reference's samples (`harness.repeats`), the largest so far of a kind of value, t a point of
Student's distribution, u the unit roundoff:

    bound(value) = t sqrt(2) s + FLOOR_ROUNDINGS u |reference|

A reference outside of its own samples did not do what they did, as where a program draws other
numbers: there is no bound, which is an error. Where no sample rounds anything, bits are due.
"""

import functools
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace

from harness.checks import check
from harness.checks.complete import find_flaw
from harness.checks.evidence import (
    Options,
    Runs,
    alike,
    count,
    diverged,
    error,
    failed,
    passed,
    shared_pairs,
    show_float,
    step_table,
    where,
)
from harness.checks.exact import quantities
from harness.records import CheckResult, Difference, FloatBits, RunResult, What, ulp_distance
from harness.repeats import samples_of
from harness.tolerance import Close, LossGap, tolerance_of

FALSE_ALARM = 1e-4  # of a case: the most that a right program fails with, or has no verdict
FLOOR_ROUNDINGS = 8
_LEAST_PATTERNS = 8  # fewer numbers may end in zeros by chance
_ROUNDOFF = ((0xFFFF, 2.0**-8), (0x1FFF, 2.0**-11), (0, 2.0**-24))
"""Bits of a float32 that bfloat16 and float16 lack, and unit roundoffs."""
Place = tuple[int, int, str]  # step, rank, quantity
_Values = Mapping[Place, FloatBits]
Excess = Callable[[Place, FloatBits | None, FloatBits | None], float]
"""A gap in units of what is allowed: above 1 it is beyond."""


@check(
    "loss", "bits of losses and gradient norm, or within the tolerance of `compare.expect`",
    compares=True,
)  # fmt: skip
def within(runs: Runs, _: Options) -> CheckResult:
    """Losses of reference and candidate, by bits or within the case's tolerance."""
    reference, candidate, tolerance = runs.reference, runs.candidate, tolerance_of(runs.case.expect)
    if tolerance is None:
        return loss(reference, candidate)
    if isinstance(tolerance, LossGap):
        return _loss_gap(reference, candidate, tolerance)
    excess: Callable[..., float]
    if isinstance(tolerance, Close):
        close = tolerance.excess
        excess = lambda _, left, right: close(left, right)  # noqa: E731 - two forms of one thing
    else:
        try:
            measured = measure(runs)
        except Unmeasured as why:
            return error("loss", why.what, str(why))
        if measured is None:
            result = loss(reference, candidate)
            message = f"no sample has rounded anything, so bits are due: {result.message}"
            return replace(result, message=message)
        excess = measured
    return _compare(
        reference, candidate, str(tolerance), lambda at, a, b: excess(at, _number(a), _number(b))
    )


def loss(reference: RunResult, candidate: RunResult) -> CheckResult:
    """Compare the bits of every loss, microbatch loss and gradient norm that a run holds."""
    return _compare(
        reference, candidate, "",
        lambda _, a, b: 0.0 if a is not None and b is not None and a.bits == b.bits else math.inf,
    )  # fmt: skip


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
    if len({run.spec.config.get("evaluate_every", 0) for run in (reference, candidate)}) == 2:
        # Evaluations of one run alone, which must leave all else as it is.
        both = [each for each in both if each[0][2] != "evaluation" or None not in each]
    if tolerance:
        # A norm for which both runs left the update out is no number, and within nothing.
        skipped = {at[:2] for at in left.keys() & right.keys() if at[2] == "skipped"}
        both = [each for each in both if each[0][2] != "grad_norm" or each[0][:2] not in skipped]
    if not both:
        message = "the runs share no recorded loss or norm: nothing to compare"
        return error("loss", "not_run", message)
    gaps = [(excess(*each), *each) for each in both]
    # Equal infinities are outside of a tolerance: `finite` says so, too.
    beyond = [gap for gap in gaps if not gap[0] <= 1]
    size, at, a, b = max(gaps, key=lambda gap: (gap[0], -gap[1][0], -gap[1][1]))
    note = ""
    if tolerance:
        note = f"; the largest gap is {size:.3g} times what {tolerance} allow, of {at[2]} "
        note += where(_difference(at, a, b))
    figures = {"largest_gap": size} if tolerance and math.isfinite(size) else {}
    if not beyond:
        how = f"within {tolerance}" if tolerance else "equal bit for bit"
        message = f"{count(len(gaps), 'value')} of losses and norms {how} in "
        message += f"{count(len(pairs), '(step, rank) pair')}{note}"
        return passed("loss", message, pairs=len(pairs), differing_pairs=0, **figures)
    _, at, a, b = min(beyond, key=lambda gap: _order(gap[1]))
    found = _difference(at, a, b)
    if not tolerance and a is not None and b is not None:
        found = replace(found, ulps=ulp_distance(a, b))
        if found.ulps is not None:
            note = f"; {count(found.ulps, 'ulp') if found.ulps else 'the sign of a zero'} apart"
    places = [(gap[1][1], gap[1][2]) for gap in beyond if gap[1][0] == at[0]]
    bad = len({gap[1][:2] for gap in beyond}), len(pairs)
    named = f"{at[2]}{f', beyond {tolerance},' if tolerance else ''}"
    result = diverged("loss", named, found, "value", places, bad, note)
    return replace(result, figures=result.figures | figures)


def _order(at: Place) -> tuple[object, ...]:
    """At the lowest step losses come before norm and evaluation, then the lowest rank."""
    step, rank, name = at
    late = {"grad_norm": 1, "skipped": 2, "evaluation": 3}.get(name, 0)
    return (step, late, name != "loss", len(name), name, rank)


def _loss_gap(reference: RunResult, candidate: RunResult, tolerance: LossGap) -> CheckResult:
    ours, theirs = _values(reference), _values(candidate)
    steps = sorted({at[0] for at in shared_pairs(step_table(reference), step_table(candidate))})
    if len(steps) < tolerance.over:
        message = (
            f"the runs have {count(len(steps), 'step')}, the tolerance is over {tolerance.over}"
        )
        return error("loss", "unsupported", message)
    last = steps[-tolerance.over :]
    # A rank that records no loss in either run, as in a pipeline, has no part in the mean.
    places = sorted(at for at in {*ours, *theirs} if at[0] in last and at[2] == "loss")
    if not places:
        return error("loss", "not_run", "the runs recorded no loss there: nothing to compare")
    gaps: dict[Place, float] = {}
    for at in places:
        gaps[at] = _number(theirs.get(at)) - _number(ours.get(at))
        if not math.isfinite(gaps[at]):
            found = _difference(at, ours.get(at), theirs.get(at))
            message = f"the loss is no number in both runs, {where(found)}"
            return failed("loss", "diverged", message, found)
    mean, gap = (
        math.fsum(values) / len(places)
        for values in ((_number(ours[at]) for at in places), gaps.values())
    )
    worst = max(places, key=lambda at: abs(gaps[at]))
    found = _difference(worst, ours[worst], theirs[worst])
    message = (
        f"the mean loss of the last {count(tolerance.over, 'step')} is {mean:.9g} in the reference "
        f"and {gap:+.3g} off in the candidate, where {tolerance.loss_gap:g} is allowed; the "
        f"largest gap of one step is {gaps[worst]:+.3g}, {where(found)}"
    )
    figures = {"reference_mean": mean, "candidate_mean": mean + gap, "gap": abs(gap)}
    if abs(gap) <= tolerance.loss_gap:
        return passed("loss", message, **figures)
    return failed("loss", "diverged", message, found, **figures)


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


def measure(runs: Runs) -> Callable[..., float] | None:
    """The gap of two numbers at a place in units of its bound; None if no sample rounds anything.

    Raises:
        Unmeasured: a sample is missing or not whole, lacks a value, or has one that is no number;
            or the reference is none of what the samples are.
    """
    ours, number = _values(runs.reference), len(runs.samples)
    due = [spec.key for spec in samples_of(runs.case)]
    if [run.spec.key for run in runs.samples] != due or not ours:
        message = f"expected {len(due)} samples of the reference, which records losses or norms"
        raise Unmeasured("not_run", message)
    tables = [_of_sample(runs.reference, run, n, ours) for n, run in enumerate(runs.samples, 1)]
    if all(table[place].bits == ours[place].bits for table in tables for place in ours):
        return None
    numbers = {place: [float(table[place].value or 0) for table in tables] for place in ours}
    factor = quantile(FALSE_ALARM / (2 * len(ours)), number - 1)
    deviations: dict[tuple[int, str], float] = {}
    largest: dict[str, float] = {}
    patterns: dict[str, set[int]] = {}
    for place in sorted(ours, key=lambda each: each[0]):
        kind = _kind(place)
        largest[kind] = max(largest.get(kind, 0.0), statistics.stdev(numbers[place]))
        deviations[place[0], kind] = largest[kind]
        held = patterns.setdefault(kind, set())
        held.update(int(table[place].bits, 16) for table in (ours, *tables))
    floors = {kind: FLOOR_ROUNDINGS * _roundoff(held) for kind, held in patterns.items()}

    def excess(place: Place, left: float, right: float, runs: float = math.sqrt(2)) -> float:
        """Of a gap with the standard deviation of `runs` samples; infinite if it is no number."""
        gap, kind = abs(right - left), _kind(place)
        if not math.isfinite(gap):
            return math.inf
        bound = factor * runs * deviations[place[0], kind] + floors[kind] * abs(left)
        return gap / bound if bound else (math.inf if gap else 0.0)

    for place in sorted(ours):
        if (value := ours[place].value) is None:
            continue  # is within nothing, whatever the bound
        mean = math.fsum(numbers[place]) / number
        if not (units := excess(place, value, mean, math.sqrt(1 + 1 / number))) <= 1:
            message = (
                "the reference is not what its samples of rounding are: its {2} at step {0} on "
                "rank {1} is off their mean by {3:.3g} times what rounding explains; a program "
                "that draws random numbers from what it computes, or whose updates are lost to "
                "rounding, has no such bound"
            ).format(*place, units)
            raise Unmeasured("unsupported", message)
    return excess


def _kind(place: Place) -> str:
    """`loss`, `microbatch_losses` or `grad_norm`."""
    return place[2].partition("[")[0]


def _roundoff(patterns: set[int]) -> float:
    formats = _ROUNDOFF if len(patterns) >= _LEAST_PATTERNS else _ROUNDOFF[-1:]
    return next(u for lacking, u in formats if not any(bits & lacking for bits in patterns))


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
        theirs, at = found.get(place), "{2} at step {0} on rank {1}".format(*place)
        if theirs is None or (value.value is not None and theirs.value is None):
            what: What = "not_run" if theirs is None else "unsupported"
            message = f"{name}, {at}: {show_float(theirs)}, the reference has {show_float(value)}"
            raise Unmeasured(what, message)
    return found
