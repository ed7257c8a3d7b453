"""Does a difference come again? Evidence for a failed verdict, which stays failed.

failed for bits -> reference and candidate are run once more -> their repeats are judged
    the same first difference, in place and bits   came_again           a defect
    another first difference                       differs_otherwise
    none                                           did_not_come_again   rare nondeterminism
    a repeat that is not whole, or elsewhere       not_made
"""

from dataclasses import replace

from harness.checks.evidence import when
from harness.checks.judge import first_failure, judge, unequal
from harness.records import CaseSpec, CheckResult, Confirmation, RunResult, Verdict
from harness.repeats import confirming_runs
from harness.store.streams import aligned

BITS = ("loss", "state", "taps")
_GATES = (
    "records:reference", "records:candidate", "environment:control", "environment:candidate",
)  # fmt: skip


def is_due(case: CaseSpec, verdict: Verdict) -> bool:
    """Whether bits of two whole runs differ, by their verdict, and the case wants it confirmed."""
    if not case.confirm or verdict.outcome != "failed" or _first(verdict) is None:
        return False
    # A candidate that did not end differs, too, but its end is what is to be explained.
    return not verdict.check.startswith("records:")


def is_open(case: CaseSpec, verdict: Verdict) -> bool:
    """Whether a confirmation is due that was not made, for whatever reason."""
    made = verdict.confirmation is not None and verdict.confirmation.outcome != "not_made"
    return is_due(case, verdict) and not made


def not_made(case: CaseSpec) -> Confirmation:
    """What the verdict holds until the repeats have ended."""
    keys = {side: spec.key for side, spec in confirming_runs(case).items()}
    return Confirmation(outcome="not_made", runs=keys)


def confirmation(
    case: CaseSpec, verdict: Verdict, first: tuple[RunResult, RunResult],
    again: tuple[RunResult, RunResult],
) -> Confirmation:  # fmt: skip
    """Judge the repeats `again` of the runs `first`, reference and candidate, of a case that failed
    by its verdict, for which `is_due` holds."""
    checks = {name: options for name, options in case.checks.items() if name in BITS}
    question = replace(
        case, reference=again[0].spec, control=first[0].spec, candidate=again[1].spec,
        checks=checks or {"state": {}}, repeats=0, confirm=False,
    )  # fmt: skip
    found = judge(question, again[0], first[0], again[1])
    by_name = {result.check: result for result in found.checks}
    for name in _GATES:
        if by_name[name].outcome != "passed":
            return replace(not_made(case), what=by_name[name].what)
    before, now = _first(verdict), _first(found)
    place = None if now is None else now.difference
    same = before is not None and place is not None and place == before.difference
    return replace(
        not_made(case), difference=place,
        outcome="did_not_come_again" if now is None else "came_again" if same
        else "differs_otherwise",
        reference_repeats=by_name["control"].outcome == "passed",
        candidate_repeats=not unequal(*aligned(first[1], again[1])),
    )  # fmt: skip


def words(found: Confirmation) -> str:
    """A confirmation in one line, for people."""
    if found.outcome == "not_made":
        why = f"a repeat cannot be compared, {found.what}" if found.what else "it was not made yet"
        return f"not confirmed: {why}"
    repeats = {"reference": found.reference_repeats, "candidate": found.candidate_repeats}
    unlike = " and ".join(side for side, same in repeats.items() if not same)
    if found.outcome == "came_again":
        more = f", other bits of {unlike} did not" if unlike else ", as did every bit of both"
        return f"confirmed: the same difference came again in a second pair of runs{more}"
    where = "no bit differs"
    if (at := found.difference) is not None:
        where = f"{at.tensor or at.quantity} differs first {when(at.step)} on rank {at.rank}, with "
        where += f"{at.reference} and {at.candidate}"
    return f"not confirmed: in a second pair of runs {where}; not deterministic: {unlike}"


def _first(verdict: Verdict) -> CheckResult | None:
    return first_failure(result for result in verdict.checks if result.check in BITS)
