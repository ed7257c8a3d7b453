"""JSON Schema (draft 2020-12) of what the harness writes, made from the types that it is made of.

    record   a line of a rank's records                 outcome   a run's outcome.json
    verdict  a case's verdict.json                      case      a case's case.json
    report   report/report.json                         run       what `harness run --json` prints

`python -m reports.json_schema` writes them to `schemas/`; a test holds that nothing there differs
from the code, and that real files fit. As in `harness.codec`, an unknown key is an error, a key may
be absent only if it has a default, and a float may be written as an integer.
"""

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any, Literal

from harness.records import (
    OUTCOMES,
    RECORD_KINDS,
    CaseSpec,
    FloatBits,
    RunOutcome,
    Verdict,
)
from harness.runner.occupancy import Occupancy
from harness.runner.retries import Attempt
from harness.store import LEGS
from harness.store.files import FILES_KEY
from harness.store.files import KEY as CHECKSUM_KEY
from harness.tolerance import Expect
from reports.addresses import LegAddresses
from reports.json_report import REPORT_SCHEMA_VERSION

FOLDER = Path(__file__).parent / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SCALARS: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_TEXT: dict[str, Any] = {"type": "string"}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}


def schemas() -> dict[str, dict[str, Any]]:
    """Every schema, by the name of its file without `.schema.json`."""
    made = {}
    for name, (title, make) in _MAKERS.items():
        parts = _Parts()
        body = make(parts)
        head = {"$schema": DIALECT, "title": title}
        made[name] = head | body | {"$defs": dict(sorted(parts.defined.items()))}
    return made


def text_of(schema: dict[str, Any]) -> str:
    """A schema as its file holds it."""
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


def write(folder: Path = FOLDER) -> None:
    """Write every schema."""
    folder.mkdir(exist_ok=True)
    for name, schema in schemas().items():
        (folder / f"{name}.schema.json").write_text(text_of(schema))


class _Parts:
    """Schemas of the types that one file needs, each defined once."""

    def __init__(self) -> None:
        self.defined: dict[str, dict[str, Any]] = {}

    def of(self, kind: Any) -> dict[str, Any]:
        """The schema of a type, as `harness.codec` decodes it.

        Raises:
            TypeError: a type that the codec does not know either.
        """
        if kind is Any:
            return {}
        if kind in _SCALARS:
            return {"type": _SCALARS[kind]}
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            return self._of_dataclass(kind)
        return self._of_generic(kind, typing.get_origin(kind), typing.get_args(kind))

    def _of_generic(self, kind: Any, origin: Any, args: tuple[Any, ...]) -> dict[str, Any]:
        if origin is Literal:
            return {"enum": list(args)}
        if origin in (typing.Union, types.UnionType):
            options = [self.of(option) for option in args if option is not type(None)]
            return {"anyOf": [*options, *([{"type": "null"}] if type(None) in args else [])]}
        if origin is tuple:
            return {"type": "array", "items": self.of(args[0])}
        if origin is dict:
            return {"type": "object", "additionalProperties": self.of(args[1])}
        raise TypeError(f"Expected a type of a record, got {kind!r}")

    def _of_dataclass(self, kind: type[Any]) -> dict[str, Any]:
        name = kind.__name__
        if name not in self.defined:
            self.defined[name] = {}
            hints = typing.get_type_hints(kind)
            fields = dataclasses.fields(kind)
            properties = {field.name: self.of(hints[field.name]) for field in fields}
            if kind is FloatBits:
                properties["bits"] = {"type": "string", "pattern": "^([0-9a-f]{8}|[0-9a-f]{16})$"}
            self.defined[name] = exact(
                properties,
                optional=[
                    field.name
                    for field in fields
                    if field.default is not dataclasses.MISSING
                    or field.default_factory is not dataclasses.MISSING
                ],
            )
        return {"$ref": f"#/$defs/{name}"}


def exact(properties: dict[str, Any], optional: typing.Sequence[str] = ()) -> dict[str, Any]:
    """An object with these keys and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(set(properties) - set(optional)),
        "additionalProperties": False,
    }


def _record(parts: _Parts) -> dict[str, Any]:
    lines = []
    for name, kind in RECORD_KINDS.items():
        reference = parts.of(kind)
        # The codec takes a record's kind from it, whatever the default says.
        definition = parts.defined[kind.__name__]
        definition["required"] = sorted({*definition["required"], "kind"})
        definition["properties"]["kind"] = {"const": name}
        lines.append(reference)
    return {"oneOf": lines}


def _file(kind: type[Any], *own: str) -> Any:
    """A file that holds one object, with its checksum and those of the files it speaks for."""

    def make(parts: _Parts) -> dict[str, Any]:
        definition: dict[str, Any] = parts.defined[parts.of(kind)["$ref"].rpartition("/")[2]]
        whole = parts.defined.pop(kind.__name__)
        sums = {CHECKSUM_KEY: _TEXT, FILES_KEY: parts.of(dict[str, str])}
        properties = definition["properties"] | {key: sums[key] for key in own}
        return whole | {
            "properties": properties, "required": sorted([*definition["required"], *own]),
        }  # fmt: skip

    return make


def _report(parts: _Parts) -> dict[str, Any]:
    by_leg = {"type": "object", "propertyNames": {"enum": list(LEGS)}}
    case = exact({
        "id": _TEXT,
        "labels": parts.of(dict[str, str]),
        "expect": parts.of(Expect),
        "verdict": parts.of(Verdict),
        "command": _TEXT,
        "delta_loss": {"type": ["string", "null"]},
        "peak_bytes": by_leg | {"additionalProperties": parts.of(dict[str, int])},
        "times": exact({
            "step_s": by_leg | {"additionalProperties": parts.of(float | None)},
            "speed": parts.of(float | None), "control_speed": parts.of(float | None),
            "caution": _TEXT,
        }),
        "addresses": by_leg | {"additionalProperties": _addresses(parts)},
        "environments": by_leg | {"additionalProperties": _TEXT},
        "environment_note": _TEXT,
        "attempts": by_leg | {"additionalProperties": parts.of(tuple[Attempt, ...])},
    })  # fmt: skip
    parts.defined["Case"] = case
    return exact({
        "schema_version": {"const": REPORT_SCHEMA_VERSION},
        "scenario": _TEXT,
        "why": _TEXT,
        "exit_code": _COUNT,
        "counts": exact(dict.fromkeys(OUTCOMES, _COUNT)),
        "history_note": _TEXT,
        "notes": parts.of(tuple[str, ...]),
        "cases": {"type": "array", "items": {"$ref": "#/$defs/Case"}},
        "environments": {"type": "object", "additionalProperties": {"type": "object"}},
        "times": exact({
            "created": _TEXT, "folder": _TEXT, "command_line": _TEXT,
            "attempts": parts.of(dict[str, int]),
        }),
    })  # fmt: skip


def _addresses(parts: _Parts) -> dict[str, Any]:
    reference = parts.of(dict[str, int])
    plain = dict.fromkeys(("captured", "by_owner", "by_place", "unnamed"), _COUNT)
    made = exact({"leg": _TEXT, "moved": reference, "names": parts.of(tuple[str, ...]), **plain})
    # JSON has no integer keys: steps are text there.
    assert set(made["properties"]) == {field.name for field in dataclasses.fields(LegAddresses)}
    return made


def _occupancy(parts: _Parts) -> dict[str, Any]:
    parts.of(Occupancy)
    own = parts.defined.pop(Occupancy.__name__)
    own["properties"]["share"] = {"type": "number"}
    own["required"] = sorted({*own["required"], "share"})
    return own


def _run(parts: _Parts) -> dict[str, Any]:
    return exact({
        "exit_code": _COUNT,
        "folder": _TEXT,
        "reports": parts.of(dict[str, str]),
        "verdicts": parts.of(tuple[Verdict, ...]),
        "num_cases": _COUNT,
        "wall_s": {"type": "number", "minimum": 0},
        "occupancy": _occupancy(parts),
    })  # fmt: skip


_MAKERS: dict[str, tuple[str, Any]] = {
    "record": ("A line of a rank's records", _record),
    "outcome": ("outcome.json of a run", _file(RunOutcome, CHECKSUM_KEY, FILES_KEY)),
    "verdict": ("verdict.json of a case", _file(Verdict, CHECKSUM_KEY, FILES_KEY)),
    "case": ("case.json of a case", _file(CaseSpec, CHECKSUM_KEY)),
    "report": ("report.json", _report),
    "run": ("What `harness run --json` prints", _run),
}


if __name__ == "__main__":
    write()
