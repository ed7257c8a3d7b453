"""Are timed repeats the runs that they repeat? Same environment, same bits as the reference.

Each is one more chance for a race to show: a repeat of the candidate that differs is a failure of
the candidate, one of the reference makes the reference nondeterministic. Repeats that are not whole
are left to `throughput`, which names them.
"""

import dataclasses
from collections.abc import Sequence

from harness.checks import environment, state
from harness.checks import exact as loss
from harness.checks.answer import error, passed
from harness.checks.complete import find_flaw
from harness.records import CaseSpec, CheckResult, RunResult
from harness.repeats import timed_pairs

NAME = "repeats"


def check(case: CaseSpec, reference: RunResult, repeats: Sequence[RunResult]) -> CheckResult:
    """Compare every whole repeat of both legs with the reference.

    Args:
        case: how many pairs there are to be.
        repeats: of reference and candidate in turn, as `timed_pairs` has them.
    """
    due = [spec for pair in timed_pairs(case) for spec in pair]
    if [run.spec.key for run in repeats] != [spec.key for spec in due]:
        return error(NAME, "corrupt_record", f"expected {case.repeats} pairs of the case's repeats")
    for number, run in enumerate(repeats):
        if find_flaw(run) is not None:
            continue
        leg = "candidate" if number % 2 else "reference"
        name = f"repeat {number // 2} of the {leg}"
        answer = environment.check(reference, run, name)
        if answer.outcome != "passed":
            return dataclasses.replace(answer, check=NAME)
        for differs in (state.check(reference, run, {}), loss.check(reference, run, {})):
            if differs.outcome != "passed":
                return _said(leg, name, differs)
    return passed(NAME, f"{len(repeats)} timed repeats have the bits of the reference")


def _said(leg: str, name: str, differs: CheckResult) -> CheckResult:
    message = f"{name}: {differs.message}"
    if leg == "candidate" or differs.outcome != "failed":
        return dataclasses.replace(differs, check=NAME, message=message)
    return dataclasses.replace(
        differs, check=NAME, outcome="incomparable", what="nondeterministic_reference",
        message=f"the reference differs from one of its repeats: {message}",
    )  # fmt: skip
