"""The report for programs: everything that the other formats show, and a version to go by."""

import json
from typing import Any, TypedDict

from harness.records import Verdict
from harness.runner.retries import Attempt
from harness.tolerance import Expect
from reports.compared import GroupMap
from reports.report import Addresses, CaseReport, Output, Report
from reports.text import well_formed

REPORT_SCHEMA_VERSION = 2
_TIME = float | None


# What each key holds; `reports.json_schema` makes the schema of it.
class RunFacts(TypedDict):
    """What is known of the run as a whole; it differs from run to run."""

    created: str
    commit: str
    machine: str
    wall_s: float
    folder: str
    command_line: str
    attempts: dict[str, int]


class StateJson(TypedDict):
    """One tensor group; a pair is a step (-1 before step 0) and a rank."""

    group: str
    num_tensors: int
    num_pairs: int
    differing_pairs: int
    missing_pairs: int
    most_tensors: int
    first: tuple[int, ...]


class TimesJson(TypedDict):
    """Step times by role, and speeds against the reference."""

    step_s: dict[str, _TIME]
    speed: _TIME
    control_speed: _TIME
    caution: str


class CaseJson(TypedDict):
    """One case; mappings are by role, `peak_bytes` by role and rank."""

    id: str
    labels: dict[str, str]
    expect: Expect
    verdict: Verdict
    command: str
    bisect: str
    delta_loss: str | None
    state: list[StateJson]
    peak_bytes: dict[str, dict[str, int]]
    times: TimesJson
    addresses: dict[str, Addresses]
    environments: dict[str, str]
    environment_note: str
    output: Output | None
    attempts: dict[str, tuple[Attempt, ...]]


class ReportJson(TypedDict):
    """report.json."""

    schema_version: int
    scenario: str
    why: str
    exit_code: int
    counts: dict[str, int]
    history_note: str
    notes: tuple[str, ...]
    cases: list[CaseJson]
    environments: dict[str, dict[str, Any]]
    run: RunFacts


def render(report: Report) -> str:
    """Indented JSON with sorted keys; what varies between equal results is in `reports.same`."""
    run = {key: report.__dict__[key] for key in RunFacts.__annotations__}
    facts = report.__dict__ | {
        "schema_version": REPORT_SCHEMA_VERSION,
        "cases": [_case(case) for case in report.cases],
        "run": run | {"folder": str(report.folder)},
    }
    plain = _storable({key: facts[key] for key in ReportJson.__annotations__})
    return json.dumps(plain, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _case(case: CaseReport) -> dict[str, Any]:
    facts = case.__dict__ | {
        "id": case.spec.id,
        "labels": case.spec.labels,
        "expect": case.spec.expect,
        "verdict": case.verdict.to_json(),
        "delta_loss": case.curve.words if case.curve is not None else None,
        "state": [_group(group) for group in case.state.groups] if case.state is not None else [],
        "peak_bytes": case.peaks,
        "times": {name: getattr(case.cost, name) for name in TimesJson.__annotations__},
        "addresses": {role: found.to_json() for role, found in case.addresses.items()},
        "output": case.output.to_json() if case.output is not None else None,
        "attempts": {role: [a.to_json() for a in own] for role, own in case.attempts.items()},
    }
    return {key: facts[key] for key in CaseJson.__annotations__}


def _group(group: GroupMap) -> dict[str, Any]:
    return {
        "group": group.group, "num_tensors": group.num_tensors, "num_pairs": len(group.counts),
        "differing_pairs": len(group.differing), "missing_pairs": group.missing,
        "most_tensors": max(0, *group.counts.values()), "first": next(iter(group.differing), ()),
    }  # fmt: skip


def _storable(value: Any) -> Any:
    """`value` with text that encodes and without numbers that JSON does not have."""
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, dict):
        return {well_formed(str(key)): _storable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(entry) for entry in value]
    if isinstance(value, float) and value - value != 0:
        return repr(value)
    return value
