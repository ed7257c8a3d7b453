"""The table of what each candidate was compared in, and what it takes beside its reference.

One row a case: how many losses and digests of tensors were compared and how many (step, rank) pairs
differ; the peak memory of the worst rank; the step time, with how far the reference is from its own
second run. Rows are text, for Markdown and the page alike.
"""

from harness.cost import Beside
from harness.records import CheckResult
from reports.report import CaseReport, Report

HEAD = (
    "case", "losses", "digests", "peak, MiB", "peak ratio", "step, ms", "speed", "A/A speed",
)  # fmt: skip
MIB = 1 << 20


def rows(report: Report) -> list[tuple[str, ...]]:
    """A row for each case whose candidate was measured, in the report's order."""
    return [_row(case) for case in report.cases if case.beside.peak_bytes.get("candidate")]


def caution(report: Report) -> str:
    """Why times are not those of the programs alone, in one sentence; "" if nothing is known."""
    found = [case.beside for case in report.cases]
    if any(each.shares_gpus for each in found):
        return "Ranks shared GPUs: step times mean nothing."
    if any(each.neighbours for each in found):
        return "Other runs were under way beside: step times are those of a shared machine."
    return ""


def _row(case: CaseReport) -> tuple[str, ...]:
    legs = case.beside
    peaks = [legs.peak_bytes.get(leg, 0) / MIB for leg in ("reference", "candidate")]
    return (
        case.spec.id,
        _compared(case, "loss", "pairs"),
        _compared(case, "state", "digests"),
        _pair(*(f"{peak:.1f}" if peak else "" for peak in peaks)),
        _ratio(legs.memory),
        _pair(*(_ms(legs, leg) for leg in ("reference", "candidate"))),
        _ratio(legs.speed),
        _ratio(legs.control_speed),
    )


def _compared(case: CaseReport, check: str, what: str) -> str:
    """'25,600 equal', '3 of 48 pairs differ', or what the check said; "" if it was not asked."""
    result = next((r for r in case.verdict.checks if r.check == check), None)
    if result is None:
        return ""
    number, differing = result.figures.get(what), result.figures.get("differing_pairs")
    if result.outcome == "passed" and number is not None and differing == 0:
        return f"{number:,.0f} equal"
    return _differing(result, differing)


def _differing(result: CheckResult, differing: float | None) -> str:
    pairs = result.figures.get("pairs")
    if not differing:
        return result.what or result.outcome
    of = f" of {pairs:,.0f}" if pairs else ""
    return f"{differing:,.0f}{of} pairs differ"


def _pair(reference: str, candidate: str) -> str:
    return f"{reference or '?'} → {candidate or '?'}" if reference or candidate else ""


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _ms(legs: Beside, leg: str) -> str:
    seconds = legs.step_s.get(leg)
    return "" if seconds is None else f"{seconds * 1e3:.4g}"
