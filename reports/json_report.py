"""The report for programs: every verdict in full, and a version to go by."""

import dataclasses
import json
from typing import Any

from harness.records import Verdict
from reports.report import CaseReport, Report
from reports.text import well_formed

REPORT_SCHEMA_VERSION = 1


def render(report: Report) -> str:
    """Indented JSON with sorted keys. Times are in `times`, of the report and of each case, and in
    each verdict's `wall_s`.

    Its schema is `schemas/report.schema.json`.
    """
    plain = {
        "schema_version": REPORT_SCHEMA_VERSION,
        "scenario": report.scenario,
        "why": report.why,
        "exit_code": report.exit_code,
        "counts": dict(report.counts),
        "history_note": report.history_note,
        "notes": list(report.notes),
        "cases": [_case(case) for case in report.cases],
        "environments": {key: dict(values) for key, values in report.environments.items()},
        "times": {
            "created": report.created,
            "folder": str(report.folder),
            "command_line": report.command_line,
            "attempts": report.attempts,
        },
    }
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


def _case(case: CaseReport) -> dict[str, Any]:
    curve = case.curve
    return {
        "id": case.spec.id,
        "labels": case.spec.labels,
        "expect": case.spec.expect,
        "verdict": case.verdict.to_json(),
        "command": case.command,
        "delta_loss": curve.words if curve is not None else None,
        "peak_bytes": {
            leg.leg: {str(rank): peak for rank, peak in leg.peaks.items()} for leg in case.memory
        },
        "times": {
            "step_s": dict(case.beside.step_s),
            "speed": case.beside.speed,
            "control_speed": case.beside.control_speed,
            "caution": case.beside.caution,
        },
        "addresses": {leg.leg: dataclasses.asdict(leg) for leg in case.addresses},
        "environments": case.environments,
        "environment_note": case.environment_note,
        "attempts": {
            leg: [attempt.to_json() for attempt in own] for leg, own in case.attempts.items()
        },
    }


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
