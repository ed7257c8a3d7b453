"""The report for programs: every verdict in full, and a version to go by."""

import json
from dataclasses import dataclass
from typing import Any

from harness.records import Json, Verdict
from harness.runner.retries import Attempt
from harness.tolerance import Expect
from reports.compared import StateMap
from reports.report import Addresses, CaseReport, Output, Report
from reports.text import well_formed

REPORT_SCHEMA_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class RunFacts(Json):
    """What is known of the run as a whole; it differs from run to run."""

    created: str
    commit: str
    machine: str
    wall_s: float
    folder: str
    command_line: str
    attempts: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class StateFacts(Json):
    """What differs of one tensor group; a pair is a (step, rank), step -1 is before step 0."""

    group: str
    num_tensors: int
    num_pairs: int
    differing_pairs: int
    missing_pairs: int
    most_tensors: int
    first_step: int | None
    first_rank: int | None


@dataclass(frozen=True, kw_only=True)
class CaseTimes(Json):
    """Step times of a case by role, and the speeds of candidate and control."""

    step_s: dict[str, float | None]
    speed: float | None
    control_speed: float | None
    caution: str


@dataclass(frozen=True, kw_only=True)
class CaseJson(Json):
    """One case; `peak_bytes` by role and rank."""

    id: str
    labels: dict[str, str]
    expect: Expect
    verdict: Verdict
    command: str
    bisect: str
    delta_loss: str | None
    state: tuple[StateFacts, ...]
    peak_bytes: dict[str, dict[str, int]]
    times: CaseTimes
    addresses: dict[str, Addresses]
    environments: dict[str, str]
    environment_note: str
    output: Output | None
    attempts: dict[str, tuple[Attempt, ...]]


@dataclass(frozen=True, kw_only=True)
class ReportJson(Json):
    """report.json; its JSON Schema is made by `python -m reports.json_schema`."""

    schema_version: int
    scenario: str
    why: str
    exit_code: int
    counts: dict[str, int]
    history_note: str
    notes: tuple[str, ...]
    cases: tuple[CaseJson, ...]
    environments: dict[str, dict[str, Any]]
    run: RunFacts


def render(report: Report) -> str:
    """Indented JSON with sorted keys; what varies between equal results is in `reports.same`."""
    plain = ReportJson(
        schema_version=REPORT_SCHEMA_VERSION,
        scenario=report.scenario,
        why=report.why,
        exit_code=report.exit_code,
        counts={**report.counts},
        history_note=report.history_note,
        notes=report.notes,
        cases=tuple(map(_case, report.cases)),
        environments={key: dict(values) for key, values in report.environments.items()},
        run=RunFacts(
            created=report.created, commit=report.commit, machine=report.machine,
            wall_s=report.wall_s, folder=str(report.folder), command_line=report.command_line,
            attempts=report.attempts,
        ),
    ).to_json()  # fmt: skip
    return json.dumps(_storable(plain), indent=1, sort_keys=True, allow_nan=False) + "\n"


def verdicts(text: str) -> tuple[Verdict, ...]:
    """The verdicts of a rendered report.

    Raises:
        RecordError: one does not decode.
        ValueError: not JSON, or another version of the schema.
    """
    plain = json.loads(text)
    if plain.get("schema_version") != REPORT_SCHEMA_VERSION:
        got = plain.get("schema_version")
        raise ValueError(f"schema_version: expected {REPORT_SCHEMA_VERSION}, got {got!r}")
    return tuple(Verdict.from_json(case["verdict"]) for case in plain["cases"])


def _case(case: CaseReport) -> CaseJson:
    found = case.cost
    return CaseJson(
        id=case.spec.id,
        labels=case.spec.labels,
        expect=case.spec.expect,
        verdict=case.verdict,
        command=case.command,
        bisect=case.bisect,
        delta_loss=case.curve.words if case.curve is not None else None,
        state=() if case.state is None else tuple(_state(case.state)),
        peak_bytes={role: {str(rank): peak for rank, peak in peaks.items()}
                    for role, peaks in case.peaks.items()},
        times=CaseTimes(step_s=dict(found.step_s), speed=found.speed,
                        control_speed=found.control_speed, caution=found.caution),
        addresses=case.addresses,
        environments=case.environments,
        environment_note=case.environment_note,
        output=case.output,
        attempts=case.attempts,
    )  # fmt: skip


def _state(state: StateMap) -> list[StateFacts]:
    return [
        StateFacts(
            group=group.group,
            num_tensors=group.num_tensors,
            num_pairs=len(group.counts),
            differing_pairs=len(group.differing),
            missing_pairs=group.missing,
            most_tensors=max(0, *group.counts.values()),
            first_step=group.differing[0][0] if group.differing else None,
            first_rank=group.differing[0][1] if group.differing else None,
        )
        for group in state.groups
    ]


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
