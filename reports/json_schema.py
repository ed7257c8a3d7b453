"""JSON Schema (draft 2020-12) of what the harness writes, made from the types that it is made of.

    record   a line of a rank's records                 outcome   a run's outcome.json
    verdict  a case's verdict.json                      case      a case's case.json
    report   report/report.json                         run       what `harness run --json` prints

`python -m reports.json_schema FOLDER` writes them; a test holds that real files fit. As in
`harness.codec`, an unknown key is an error, a key may be absent only if it has a default, and a
float may be written as an integer.
"""

import json
import sys
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from harness.records import OUTCOMES, RECORD_KINDS, CaseSpec, RunOutcome, Verdict
from harness.store.files import FILES_KEY
from harness.store.files import KEY as CHECKSUM_KEY
from reports.json_report import REPORT_SCHEMA_VERSION, ReportJson

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class RunJson(TypedDict):
    """What `harness run --json` prints."""

    exit_code: int
    folder: str
    reports: dict[str, str]
    verdicts: tuple[Verdict, ...]
    num_cases: int
    wall_s: float


_FILES: dict[str, tuple[str, Any]] = {
    "outcome": ("outcome.json of a run", RunOutcome),
    "verdict": ("verdict.json of a case", Verdict),
    "case": ("case.json of a case", CaseSpec),
    "report": ("report.json", ReportJson),
    "run": ("What `harness run --json` prints", RunJson),
}


def schemas() -> dict[str, dict[str, Any]]:
    """Every schema, by the name of its file without `.schema.json`."""
    made = {name: _schema(title, [kind]) for name, (title, kind) in _FILES.items()}
    for name in ("outcome", "verdict", "case"):  # its checksum, and those of files it speaks for
        whole = made[name]["$defs"]["File"]
        sums: dict[str, Any] = {CHECKSUM_KEY: {"type": "string"}}
        if name != "case":
            sums[FILES_KEY] = {"type": "object", "additionalProperties": {"type": "string"}}
        whole["properties"] |= sums
        whole["required"] += sums
    report = made["report"]["$defs"]["File"]["properties"]
    report["schema_version"] = {"const": REPORT_SCHEMA_VERSION}
    report["counts"] = {
        "type": "object", "properties": {name: {"type": "integer"} for name in OUTCOMES},
        "required": sorted(OUTCOMES), "additionalProperties": False,
    }  # fmt: skip
    return made | {"record": _record()}


def write(folder: Path) -> None:
    """Write every schema."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in schemas().items():
        text = json.dumps(schema, indent=1, sort_keys=True) + "\n"
        (folder / f"{name}.schema.json").write_text(text)


def _record() -> dict[str, Any]:
    made = _schema("A line of a rank's records", list(RECORD_KINDS.values()))
    for name, kind in RECORD_KINDS.items():
        # The codec takes a record's kind from it, whatever the default says.
        definition = made["$defs"][kind.__name__]
        definition["required"] = sorted({*definition["required"], "kind"})
        definition["properties"]["kind"] = {"const": name}
    return made


def _schema(title: str, kinds: list[Any]) -> dict[str, Any]:
    """Of one type, whose definition is then `File`, or of one of several."""
    found, parts = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    for definition in parts.values():
        definition.pop("description", None)
        if "properties" in definition:
            definition["additionalProperties"] = False
    if "FloatBits" in parts:
        digits = {"type": "string", "pattern": "^([0-9a-f]{8}|[0-9a-f]{16})$"}
        parts["FloatBits"]["properties"]["bits"] = digits
    body: dict[str, Any] = {"oneOf": list(found)}
    if len(kinds) == 1:
        parts["File"] = parts.pop(kinds[0].__name__)
        body = {"$ref": "#/$defs/File"}
    return {"$schema": DIALECT, "title": title, "$defs": parts, **body}


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "schemas"))
