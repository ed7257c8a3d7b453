"""Peak memory: the candidate's against the reference's rank by rank, or against a number of bytes.

The number may be a formula over what the same rank of the reference keeps (`memory_owners`).

A reference whose peak is zero or missing measured nothing, so there is no ratio and no pass.

What grows: the least memory that lived after a step of the last quarter of the run, less that of
the second quarter, when graphs are captured and all is allocated. A leak of n bytes a step shows as
half a run's n, whatever single steps hold for a while.
"""

import math
from collections.abc import Mapping

from harness.checks import memory_owners
from harness.checks.answer import error, failed, passed
from harness.checks.evidence import rank_table
from harness.checks.limits import PEAK_MEMORY
from harness.records import CheckResult, RankRecords, RunResult

NAME = "peak_memory"
PARAMETERS = PEAK_MEMORY
MIB = 1 << 20
LEAST_STEPS = 8
"""Of a run whose growth is looked at."""


def check(
    reference: RunResult, candidate: RunResult, parameters: Mapping[str, object]
) -> CheckResult:
    """Check the worst rank against each limit that is given."""
    limits = _limits(parameters)
    if isinstance(limits, CheckResult):
        return limits
    ours = {rank: peak_bytes(records) for rank, records in rank_table(reference).items()}
    theirs = {rank: peak_bytes(records) for rank, records in rank_table(candidate).items()}
    if not theirs:
        return error(NAME, "not_run", "the candidate has no rank: nothing was measured")
    for rank, peak in theirs.items():
        if peak <= 0:
            return failed(NAME, "corrupt_record", f"rank {rank} of the candidate recorded no peak")
    answers = _answers(reference, candidate, ours, theirs, limits, parameters.get("max_bytes"))
    for outcome in ("failed", "error"):
        for answer in answers:
            if answer.outcome == outcome:
                return answer
    figures = {name: value for answer in answers for name, value in answer.figures.items()}
    return passed(NAME, "; ".join(answer.message for answer in answers), **figures)


def _answers(
    reference: RunResult,
    candidate: RunResult,
    ours: dict[int, int],
    theirs: dict[int, int],
    limits: Mapping[str, float],
    formula: object,
) -> list[CheckResult]:
    answers = []
    if "max_ratio" in limits:
        answers.append(_against_reference(ours, theirs, limits["max_ratio"]))
    if "max_bytes" in limits:
        answers.append(_against_bytes(theirs, dict.fromkeys(theirs, limits["max_bytes"])))
    if isinstance(formula, str):
        answers.append(_against_formula(reference, ours, theirs, formula))
    if "max_growth_bytes" in limits:
        answers.append(_growth(candidate, limits["max_growth_bytes"]))
    if "max_unexplained" in limits:
        answers.append(memory_owners.explained(candidate, limits["max_unexplained"], theirs))
    return answers


def peak_bytes(records: RankRecords) -> int:
    """Highest memory that a rank recorded, in bytes; 0 if it recorded none."""
    peaks = [record.peak_bytes for record in records.steps]
    if records.end is not None:
        peaks.append(records.end.peak_bytes)
    return max(peaks, default=0)


def _limits(parameters: Mapping[str, object]) -> dict[str, float] | CheckResult:
    wrong = sorted(set(parameters) - set(PARAMETERS))
    if wrong or not parameters:
        got = ", ".join(wrong) if wrong else "none"
        return error(NAME, "unsupported", f"expected {' or '.join(PARAMETERS)}, got {got}")
    limits: dict[str, float] = {}
    for name, value in parameters.items():
        if name == "max_bytes" and isinstance(value, str):
            continue  # a formula
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else 0
        if not math.isfinite(number) or number <= 0:
            return error(NAME, "unsupported", f"{name}: expected a number > 0, got {value!r}")
        limits[name] = number
    return limits


def _against_reference(
    ours: dict[int, int], theirs: dict[int, int], max_ratio: float
) -> CheckResult:
    for rank in theirs:
        if ours.get(rank, 0) <= 0:
            return error(NAME, "not_run", f"rank {rank} of the reference recorded no peak")
    worst = max(theirs, key=lambda rank: (theirs[rank] / ours[rank], -rank))
    ratio = theirs[worst] / ours[worst]
    message = (
        f"peak memory of the worst rank ({worst}) is {ratio:.3f} times the reference's "
        f"({theirs[worst] / MIB:.1f} against {ours[worst] / MIB:.1f} MiB), limit {max_ratio:g}"
    )
    figures = {
        "ratio": ratio, "rank": float(worst),
        "reference_peak_bytes": float(ours[worst]), "candidate_peak_bytes": float(theirs[worst]),
    }  # fmt: skip
    # The product, not the rounded ratio, decides: 1.0 must let an equal peak through.
    if theirs[worst] > max_ratio * ours[worst]:
        return failed(NAME, "memory_regression", message, None, **figures)
    return passed(NAME, message, **figures)


def _against_formula(
    reference: RunResult, ours: dict[int, int], theirs: dict[int, int], formula: str
) -> CheckResult:
    try:
        allowed = memory_owners.limits_of(formula, reference, ours)
    except ValueError as wrong:
        return error(NAME, "not_run", f"no limit comes of {formula!r}: {wrong}")
    if set(theirs) - set(allowed):
        return error(NAME, "not_run", "the reference has fewer ranks than the candidate")
    return _against_bytes(theirs, allowed)


def _against_bytes(theirs: dict[int, int], allowed: dict[int, float]) -> CheckResult:
    worst = max(theirs, key=lambda rank: (theirs[rank] - allowed[rank], -rank))
    max_bytes = allowed[worst]
    message = (
        f"peak memory of the worst rank ({worst}) is {theirs[worst]} bytes, limit {max_bytes:.0f}"
    )
    figures = {"rank": float(worst), "candidate_peak_bytes": float(theirs[worst])}
    if theirs[worst] > max_bytes:
        return failed(NAME, "memory_regression", message, None, **figures)
    return passed(NAME, message, **figures)


def growth_bytes(records: RankRecords) -> int | None:
    """How much more memory a rank keeps late in the run than early; None of a short run."""
    live = [record.live_bytes for record in records.steps]
    quarter = len(live) // 4
    if len(live) < LEAST_STEPS:
        return None
    return min(live[-quarter:]) - min(live[quarter : 2 * quarter])


def _growth(candidate: RunResult, max_bytes: float) -> CheckResult:
    grown = {rank: growth_bytes(records) for rank, records in rank_table(candidate).items()}
    known = {rank: nbytes for rank, nbytes in grown.items() if nbytes is not None}
    if len(known) < len(grown):
        return error(NAME, "not_run", f"growth shows from {LEAST_STEPS} steps on, got fewer")
    worst = max(known, key=lambda rank: (known[rank], -rank))
    message = (
        f"memory that steps leave grew by {known[worst]} bytes on the worst rank ({worst}), from "
        f"the second quarter of the run to the last, limit {max_bytes:.0f}"
    )
    figures = {"growth_rank": float(worst), "growth_bytes": float(known[worst])}
    if known[worst] > max_bytes:
        return failed(NAME, "memory_regression", message, None, **figures)
    return passed(NAME, message, **figures)
