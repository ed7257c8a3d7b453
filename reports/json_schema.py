"""JSON Schema (draft 2020-12) of what the harness writes, made from the types that it is made of.

`python -m reports.json_schema FOLDER` writes a file for each of: `record` (a line of a rank's
records), `outcome` and `verdict` and `case` (files of a run folder), `report` (report.json). An
unknown key is an error, a key may be absent only if it has a default, and a float may be written as
an integer.
"""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from harness.records import RECORD_KINDS, CaseSpec, RunOutcome, Verdict
from harness.store.files import FILES_KEY
from harness.store.files import KEY as CHECKSUM_KEY
from reports.json_report import ReportJson

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TEXT = {"type": "string"}


def schemas() -> dict[str, dict[str, Any]]:
    """Every schema, by the name of its file without `.schema.json`."""
    files = {"outcome": RunOutcome, "verdict": Verdict, "case": CaseSpec, "report": ReportJson}
    made = {name: _schema([kind]) for name, kind in files.items()}
    for name in ("outcome", "verdict", "case"):  # its checksum, and those of files it speaks for
        whole = made[name]["$defs"][files[name].__name__]
        sums: dict[str, Any] = {CHECKSUM_KEY: _TEXT}
        if name != "case":
            sums[FILES_KEY] = {"type": "object", "additionalProperties": _TEXT}
        whole["properties"] |= sums
        whole["required"] += sums
    made["record"] = _schema(list(RECORD_KINDS.values()))
    for name, kind in RECORD_KINDS.items():
        # The codec takes a record's kind from it, whatever the default says.
        definition = made["record"]["$defs"][kind.__name__]
        definition["required"] = sorted({*definition["required"], "kind"})
        definition["properties"]["kind"] = {"const": name}
    return made


def write(folder: Path) -> None:
    """Write every schema."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in schemas().items():
        text = json.dumps(schema, indent=1, sort_keys=True) + "\n"
        (folder / f"{name}.schema.json").write_text(text)


def _schema(kinds: list[Any]) -> dict[str, Any]:
    found, parts = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    for definition in parts.values():
        definition.pop("description", None)
        if "properties" in definition:
            definition["additionalProperties"] = False
    if "FloatBits" in parts:
        parts["FloatBits"]["properties"]["bits"] = _TEXT | {
            "pattern": "^([0-9a-f]{8}|[0-9a-f]{16})$"
        }
    return {"$schema": DIALECT, "$defs": parts, "oneOf": list(found)}


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "schemas"))
