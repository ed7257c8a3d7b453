"""JSON Schema (draft 2020-12) of what the harness writes, made from the types that it is made of.

    record   a line of a rank's records                 outcome   a run's outcome.json
    verdict  a case's verdict.json                      case      a case's case.json
    report   report/report.json                         run       what `harness run --json` prints

`python -m reports.json_schema FOLDER` writes them; a test holds that real files fit. As in
`harness.codec`, an unknown key is an error, a key may be absent only if it has a default, and a
float may be written as an integer.
"""

import dataclasses
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal

from harness.checksum import KEY as CHECKSUM_KEY
from harness.records import (
    OUTCOMES,
    RECORD_KINDS,
    CaseSpec,
    FloatBits,
    RunOutcome,
    Verdict,
)
from harness.runner.occupancy import Occupancy
from reports.json_report import REPORT, REPORT_SCHEMA_VERSION

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


def write(folder: Path) -> None:
    """Write every schema."""
    folder.mkdir(parents=True, exist_ok=True)
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
        if isinstance(kind, dict):
            return exact({name: self.of(entry) for name, entry in kind.items()})
        if isinstance(kind, list):
            return {"type": "array", "items": self.of(kind[0])}
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


def _file(kind: type[Any]) -> Any:
    """A file that holds one object, with its checksum in files that have one."""

    def make(parts: _Parts) -> dict[str, Any]:
        definition: dict[str, Any] = parts.defined[parts.of(kind)["$ref"].rpartition("/")[2]]
        own = parts.defined.pop(kind.__name__)
        return own | {"properties": definition["properties"] | {CHECKSUM_KEY: _TEXT}}

    return make


def _report(parts: _Parts) -> dict[str, Any]:
    made = parts.of(REPORT)
    version = {"schema_version": {"const": REPORT_SCHEMA_VERSION}}
    made["properties"] |= version | {"counts": exact(dict.fromkeys(OUTCOMES, _COUNT))}
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
    "outcome": ("outcome.json of a run", _file(RunOutcome)),
    "verdict": ("verdict.json of a case", _file(Verdict)),
    "case": ("case.json of a case", _file(CaseSpec)),
    "report": ("report.json", _report),
    "run": ("What `harness run --json` prints", _run),
}


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "schemas"))
