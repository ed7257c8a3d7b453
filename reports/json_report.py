"""The report for programs: everything that the other formats show, and a version to go by.

`python -m reports.json_report` prints its JSON Schema, made from the types below.
"""

import json
import sys
from typing import Any, TypedDict

import msgspec

from harness.records import Verdict
from harness.runner.run import Attempt
from harness.values import Expect
from reports.compared import GroupMap
from reports.reading import CaseReport, Output, Report
from reports.text import well_formed

REPORT_SCHEMA_VERSION = 3


class _Run(TypedDict):  # it differs from run to run
    created: str
    commit: str
    machine: str
    wall_s: float
    folder: str
    command_line: str


class _State(TypedDict):  # of one tensor group; a pair is a step (-1 before step 0) and a rank
    group: str
    num_tensors: int
    num_pairs: int
    differing_pairs: int
    missing_pairs: int
    most_tensors: int
    first: tuple[int, ...]


class _Times(TypedDict):  # of a step by role, and speeds against the reference
    step_s: dict[str, float | None]
    speed: float | None
    control_speed: float | None
    caution: str


class _Case(TypedDict):  # mappings are by role, `peak_bytes` by role and rank
    id: str
    labels: dict[str, str]
    expect: Expect
    verdict: Verdict
    command: str
    bisect: str
    delta_loss: str | None
    state: list[_State]
    peak_bytes: dict[str, dict[str, int]]
    times: _Times
    addresses: dict[str, str]
    environments: dict[str, str]
    environment_note: str
    output: Output | None
    attempts: dict[str, tuple[Attempt, ...]]


class _Report(TypedDict):
    schema_version: int
    scenario: str
    why: str
    exit_code: int
    counts: dict[str, int]
    history_note: str
    notes: tuple[str, ...]
    cases: list[_Case]
    environments: dict[str, dict[str, Any]]
    run: _Run


def render(report: Report) -> str:
    """Indented JSON with sorted keys; `run`, `times`, `attempts` and `wall_s` differ between equal
    results."""
    run = {key: report.__dict__[key] for key in _Run.__annotations__}
    facts = report.__dict__ | {
        "schema_version": REPORT_SCHEMA_VERSION, "cases": [_case(case) for case in report.cases],
        "run": run | {"folder": str(report.folder)},
    }  # fmt: skip
    plain = _storable({key: facts[key] for key in _Report.__annotations__})
    return json.dumps(plain, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _case(case: CaseReport) -> dict[str, Any]:
    facts = case.__dict__ | {
        "id": case.spec.id,
        "labels": case.spec.labels,
        "expect": case.spec.expect,
        "verdict": case.verdict.to_json(),
        "delta_loss": case.curve.words if case.curve is not None else None,
        "state": [_state(group) for group in (case.state.groups if case.state is not None else ())],
        "peak_bytes": case.peaks,
        "times": {name: getattr(case.cost, name) for name in _Times.__annotations__},
        "output": case.output.to_json() if case.output is not None else None,
        "attempts": {role: [a.to_json() for a in own] for role, own in case.attempts.items()},
    }
    return {key: facts[key] for key in _Case.__annotations__}


def _state(group: GroupMap) -> _State:
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


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of report.json: an unknown key is an error."""
    (found,), parts = msgspec.json.schema_components([_Report], ref_template="#/$defs/{name}")
    for definition in parts.values():
        definition.pop("description", None)
        if "properties" in definition:
            definition["additionalProperties"] = False
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, "$defs": parts, **found}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(schema(), indent=1, sort_keys=True) + "\n")
