"""Losses and gradient norms within a stated tolerance (`harness.tolerance`), per step and rank.

It answers in place of the check `loss` where `compare.expect` is no `bitwise`. The largest gap and
its place are told in either case. What compares digests is informative then: it counts what
differs, since digests are equal or not and say nothing of how far.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from harness.checks import exact as loss
from harness.checks.answer import error, failed, passed
from harness.checks.evidence import StepTable, count, shared_pairs, show_float, step_table
from harness.checks.exact import NAME, quantities
from harness.checks.spread import Place, Unmeasured, measure
from harness.records import CheckResult, Difference, FloatBits, RunResult, StepRecord
from harness.tolerance import Close, LossGap, Rounding

MISSING = "missing"
_Value = tuple[int, int, str, FloatBits | None, FloatBits | None]
"""Step, rank, quantity, and what both runs have of it."""


def check(
    reference: RunResult,
    candidate: RunResult,
    tolerance: Close | LossGap | Rounding,
    samples: Sequence[RunResult] = (),
) -> CheckResult:
    """Compare losses of the (step, rank) pairs that both runs hold within a tolerance.

    `samples` are runs of the reference that round at random, for `rounding`.
    """
    ours, theirs = step_table(reference), step_table(candidate)
    pairs = shared_pairs(ours, theirs)
    if isinstance(tolerance, LossGap):
        return _loss_gap(ours, theirs, tolerance)
    values = [
        (step, rank, name, left, right)
        for step, rank in pairs
        for name, left, right in _both(ours[step, rank], theirs[step, rank])
    ]
    if not values:
        return error(NAME, "not_run", "the runs share no recorded loss or norm: nothing to compare")
    if isinstance(tolerance, Close):
        return _close(values, str(tolerance), lambda _, a, b: tolerance.excess(a, b))
    try:
        spread = measure(reference, samples)
    except Unmeasured as why:
        return error(NAME, why.what, str(why))
    if spread is None:
        exact = loss.check(reference, candidate, {})
        message = f"no sample has rounded anything, so bits are due: {exact.message}"
        return dataclasses.replace(exact, message=message)
    result = _close(values, str(tolerance), spread.excess)
    figures = result.figures | {"samples": float(len(samples)), "deviations": spread.factor}
    return dataclasses.replace(result, figures=figures)


def informative(result: CheckResult) -> CheckResult:
    """A check of digests under a tolerance: it says what differs and demands nothing."""
    if result.outcome != "failed":
        return result
    message = f"not demanded within a tolerance: {result.message}"
    return dataclasses.replace(result, outcome="passed", what="", message=message)


def _close(
    values: list[_Value], tolerance: str, excess: Callable[[Place, float, float], float]
) -> CheckResult:
    gaps = [
        (
            excess((step, rank, name), _number(left), _number(right)),
            -step, -rank, name, left, right,
        )
        for step, rank, name, left, right in values
    ]  # fmt: skip
    # Equal infinities are still outside: `finite` says so, too, where it was asked.
    beyond = [gap for gap in gaps if not gap[0] <= 1]
    largest = max(gaps, key=lambda gap: gap[:3])
    told = f"the largest gap is {_told(*largest)} of what {tolerance} allow"
    figures = {"values": float(len(gaps)), "beyond": float(len(beyond))}
    if math.isfinite(largest[0]):
        figures["largest_gap"] = largest[0]
    if not beyond:
        message = f"{count(len(gaps), 'value')} of losses and norms within {tolerance}; {told}"
        return passed(NAME, message, **figures)
    _, step, rank, name, left, right = max(beyond, key=lambda gap: gap[1:3])
    place = Difference(
        step=-step, rank=-rank, quantity=name, reference=_shown(left), candidate=_shown(right)
    )
    return failed(
        NAME,
        "diverged",
        f"{name} is beyond {tolerance} first at step {place.step} on rank {place.rank}: "
        f"{place.reference} became {place.candidate}; {len(beyond)} of "
        f"{count(len(gaps), 'value')} are; {told}",
        place,
        **figures,
    )


def _loss_gap(ours: StepTable, theirs: StepTable, tolerance: LossGap) -> CheckResult:
    steps = sorted({step for step, _ in (*ours, *theirs)})
    if len(steps) < tolerance.over:
        message = f"the runs have {count(len(steps), 'step')}, the tolerance is {tolerance}"
        return error(NAME, "unsupported", message)
    last = set(steps[-tolerance.over :])
    keys = sorted(key for key in {*ours, *theirs} if key[0] in last)
    both = [(key, _loss(ours, key), _loss(theirs, key)) for key in keys]
    # A rank that records no loss in either run, as in a pipeline, has no part in the mean.
    values = [each for each in both if each[1:] != (None, None)]
    if not values:
        return error(NAME, "not_run", "the runs recorded no loss there: nothing to compare")
    for (step, rank), left, right in values:
        if not (math.isfinite(_number(left)) and math.isfinite(_number(right))):
            place = Difference(
                step=step, rank=rank, quantity="loss", reference=_shown(left),
                candidate=_shown(right),
            )  # fmt: skip
            message = f"the loss of step {step} on rank {rank} is no number in both runs: "
            message += f"{place.reference} became {place.candidate}"
            return failed(NAME, "diverged", message, place)
    mean_a = math.fsum(_number(left) for _, left, _ in values) / len(values)
    mean_b = math.fsum(_number(right) for *_, right in values) / len(values)
    gap = abs(mean_b - mean_a)
    (step, rank), left, right = max(
        values, key=lambda each: abs(_number(each[2]) - _number(each[1]))
    )
    message = (
        f"the mean loss of the last {count(tolerance.over, 'step')} is {mean_a:.9g} in the "
        f"reference and {mean_b:.9g} in the candidate, {gap:.3g} apart where "
        f"{tolerance.loss_gap:g} is allowed; the largest gap of one step is "
        f"{abs(_number(right) - _number(left)):.3g}, at step {step} on rank {rank}"
    )
    figures = {"reference_mean": mean_a, "candidate_mean": mean_b, "gap": gap}
    if gap <= tolerance.loss_gap:
        return passed(NAME, message, **figures)
    place = Difference(
        step=step, rank=rank, quantity="loss", reference=_shown(left), candidate=_shown(right)
    )
    return failed(NAME, "diverged", message, place, **figures)


def _both(
    ours: StepRecord, theirs: StepRecord
) -> list[tuple[str, FloatBits | None, FloatBits | None]]:
    a, b = dict(quantities(ours)), dict(quantities(theirs))
    return [(name, a.get(name), b.get(name)) for name in a | b]


def _loss(table: StepTable, key: tuple[int, int]) -> FloatBits | None:
    return table[key].loss if key in table else None


def _number(value: FloatBits | None) -> float:
    """As a float; NaN where there is none, so that it is within nothing."""
    return math.nan if value is None or value.value is None else value.value


def _shown(value: FloatBits | None) -> str:
    return MISSING if value is None else show_float(value)


def _told(
    excess: float, step: int, rank: int, name: str, left: FloatBits | None, right: FloatBits | None
) -> str:
    return (
        f"{excess:.3g} times (step {-step}, rank {-rank}, {name}: {_shown(left)} and "
        f"{_shown(right)})"
    )
