"""Schemas made from the code: met by what is written, and by nothing that is damaged."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from harness.records import RecordError, parse_record
from reports import json_report
from reports.json_schema import schemas, write
from reports.report import Report

NAMES = ("record", "outcome", "verdict", "case", "report")


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(schemas()[name])


def lines_of(folder: Path) -> list[str]:
    return [
        line
        for path in sorted(folder.glob("runs/*/rank*.jsonl"))[:8]
        for line in path.read_text().splitlines()
    ]


def test_the_command_writes_every_schema(tmp_path: Path) -> None:
    """A file a name, each a schema by its dialect."""
    write(tmp_path / "schemas")
    found = {path.name: json.loads(path.read_text()) for path in (tmp_path / "schemas").iterdir()}
    assert set(found) == {f"{name}.schema.json" for name in NAMES}
    for schema in found.values():
        Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("name", ["outcome", "verdict", "case"])
def test_files_of_a_run_folder_fit(everything: Path, name: str) -> None:
    """Every file of these kinds in a folder with every outcome is valid."""
    paths = [*everything.glob(f"cases/*/{name}.json"), *everything.glob(f"runs/*/{name}.json")]
    assert paths
    for path in paths:
        validator(name).validate(json.loads(path.read_text()))


def test_records_fit_and_damaged_ones_do_not(everything: Path) -> None:
    """A line is valid exactly if the harness decodes it, whichever of its keys is spoilt."""
    lines = {json.loads(line)["kind"]: json.loads(line) for line in lines_of(everything)}
    assert set(lines) == {"start", "initial", "step", "end"}
    lines["event"] = {"kind": "event", "name": "n", "rank": 0, "step": 1, "detail": {"a": [1]}}
    lines["error"] = {
        "kind": "error", "rank": 0, "step": 1, "what": "oom", "type": "E", "message": "m",
        "traceback": "t", "blames": None,
    }  # fmt: skip
    check = validator("record")
    spoilt = 0
    for plain in lines.values():
        assert check.is_valid(plain)
        parse_record(json.dumps(plain))
        for damaged in damages(plain):
            spoilt += 1
            assert check.is_valid(damaged) == decodes(damaged), damaged
    assert spoilt > 100


def damages(plain: dict[str, Any]) -> list[dict[str, Any]]:
    """The record with one key away, unknown, or of another type."""
    found = [plain | {"unknown": 1}, plain | {"kind": "other"}]
    for key in plain:
        found.append({k: v for k, v in plain.items() if k != key})
        others: tuple[Any, ...] = (None, [], {}, "x", 1, True)
        found += [plain | {key: value} for value in others]
    if "loss" in plain:
        found.append(plain | {"loss": plain["loss"] | {"bits": "XYZ"}})
    return found


def decodes(plain: dict[str, Any]) -> bool:
    try:
        parse_record(json.dumps(plain))
    except RecordError:
        return False
    return True


def test_the_report_fits(summary: Report) -> None:
    """report.json of every outcome is valid; with an unknown key, or a verdict cut, it is not."""
    plain = json.loads(json_report.render(summary))
    check = validator("report")
    check.validate(plain)
    for place in ((), ("cases", 0), ("cases", 0, "verdict"), ("run",)):
        damaged = copy.deepcopy(plain)
        at: Any = damaged
        for key in place:
            at = at[key]
        at["unknown"] = 1
        assert not check.is_valid(damaged)
        del at["unknown"]
        del at[next(iter(at))]
        assert not check.is_valid(damaged)
