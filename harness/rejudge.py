"""A stored pass is believed only as far as the records bear it out.

    passed or skipped in verdict.json -> its records, judged again -> the same, or what they say

Answers other than these are kept: a record that was damaged after a case failed must not turn the
failure into a question.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.checks import judge as judge_case
from harness.errors import one_line
from harness.lookup import find_case
from harness.records import CaseSpec, RunResult, Verdict
from harness.repeats import past_legs, runs_of
from harness.retries import beside_attempts
from harness.store import LEGS, VERDICT_FILE, RunFolder, find_verdict, load_run_folder
from harness.tolerance import ROUNDING

TRUSTING = ("passed", "skipped")
"""Outcomes that damage must not leave standing."""


def confirmed(
    folder: RunFolder, case: CaseSpec, stored: Verdict, runs: Mapping[str, RunResult]
) -> Verdict:
    """The stored verdict, or what the records say where they do not bear it out.

    Args:
        folder: where the case and its runs lie.
        case: as planned.
        stored: its verdict, as read.
        runs: records of its runs, by key.
    """
    if stored.outcome not in TRUSTING:
        return stored
    # A report reads no timed runs, and of a skipped case there are none.
    legs = [runs.get(spec.key) or folder.load_run(spec) for spec in runs_of(case)]
    found = _judged(case, legs)
    return _held_against(stored, beside_attempts(folder, case, found))


def confirmed_alone(place: Path, case: CaseSpec, stored: Verdict) -> Verdict:
    """As `confirmed`, of a case's folder by itself, wherever it lies.

    There are no timed runs in it, nor samples of rounding: what is said of times, and of losses
    within rounding, is then neither believed nor denied.
    """
    if stored.outcome not in TRUSTING:
        return stored
    legs = [load_run_folder(place / leg, getattr(case, leg)) for leg in LEGS]
    unheard = {"throughput"} if case.repeats else set()
    unheard |= {"loss"} if case.expect == ROUNDING else set()
    checks = {name: options for name, options in case.checks.items() if name not in unheard}
    untimed = dataclasses.replace(case, repeats=0, checks=checks) if unheard else case
    found = _judged(untimed, legs)
    # Where times were all that was asked for, nothing is left to judge once the records are whole.
    if unheard and found.what == "not_run" and not checks:
        return stored
    return _held_against(stored, found)


def find_answer(name: str, run: Path | None) -> tuple[Path, CaseSpec, Verdict | None, str]:
    """A case's folder, the case, and its verdict; None and why if there is none that can be read.

    A pass is judged again, over all records that there are: in a run folder over those of its runs
    and over those that lie with the case, which are the same files unless somebody copied them.

    Raises:
        UsageError: there is no such case.
    """
    place, case = find_case(name, run)
    stored, why = find_verdict(place, case.id)
    if stored is None:
        return place, case, None, why
    parent = place.absolute().parent.parent
    if (parent / "manifest.json").is_file() and place.name == case.id:
        folder = RunFolder.open(parent)
        planned = next((each for each in folder.cases if each.id == case.id), None)
        if planned is not None:
            specs = {leg: getattr(planned, leg) for leg in LEGS}
            runs = {spec.key: load_run_folder(folder.leg_folder(planned, leg), spec)
                    for leg, spec in specs.items()}  # fmt: skip
            stored = confirmed(folder, planned, stored, runs)
    # Of a case that was to be skipped there may be no records: that is known in the plan alone.
    if stored.outcome == "passed":
        stored = confirmed_alone(place, case, stored)
    return place, case, stored, ""


def _judged(case: CaseSpec, legs: Sequence[RunResult]) -> Verdict:
    samples, repeats = past_legs(case, legs)
    try:
        return judge_case(case, *legs[:3], samples=samples, repeats=repeats)
    except Exception as error:  # noqa: BLE001 - what a damaged plan can lead to has no end
        why = one_line(f"{type(error).__name__}: {error}")
        return Verdict(
            case_id=case.id, outcome="error", what="corrupt_record", checks=(), wall_s=0.0,
            message=f"its plan cannot be judged: {why}",
            runs={leg: getattr(case, leg).key for leg in LEGS},
        )  # fmt: skip


def _held_against(stored: Verdict, found: Verdict) -> Verdict:
    if found.outcome == stored.outcome:
        return stored
    message = f"{found.message} ({VERDICT_FILE} says {stored.outcome}, its records do not)"
    return dataclasses.replace(found, message=message, wall_s=stored.wall_s)
