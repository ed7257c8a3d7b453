"""The report for programs: everything that the other formats show, and a version to go by."""

import json
import re
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypedDict

from harness.records import Verdict
from harness.runner.retries import Attempt
from harness.tolerance import Expect
from reports.compared import GroupMap
from reports.report import Addresses, CaseReport, Output, Report
from reports.text import well_formed

REPORT_SCHEMA_VERSION = 2
VARYING = ("run", "times", "attempts", "wall_s")
"""Keys that differ between two run folders with the same results."""
PLACE = "RUN-FOLDER"
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
    """Indented JSON with sorted keys; see `VARYING` for what differs between equal results."""
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


def differences(mine: tuple[Path, Path], other: tuple[Path, Path]) -> tuple[str, ...]:
    """Where two report.json differ first, but for `VARYING` and the folders' paths; () if nowhere.

    Args:
        mine: a report.json and the run folder that it is of.
        other: the same.
    """
    lines = zip_longest(*(normalised(*each).split("\n") for each in (mine, other)))
    for number, (left, right) in enumerate(lines, start=1):
        if left != right:
            shown = (repr((line or "").strip()[:300]) for line in (left, right))
            return (f"report.json: line {number}: {' is '.join(shown)} there",)
    return ()


def normalised(path: Path, folder: Path) -> str:
    """The text of a report.json of `folder` without `VARYING` and the folder's path."""
    place = json.dumps(str(folder.absolute()))[1:-1]
    # A path that had to be quoted for the shell is the same place as one that had not.
    quoted = re.compile(rf"'{PLACE}([A-Za-z0-9_+=,@./-]*)'")
    text = quoted.sub(rf"{PLACE}\1", path.read_text("utf-8").replace(place, PLACE))
    return json.dumps(_without_varying(json.loads(text)), indent=1, sort_keys=True)


def _without_varying(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_varying(v) for k, v in value.items() if k not in VARYING}
    return [_without_varying(entry) for entry in value] if isinstance(value, list) else value
