"""YAML to values that remember where they were written, and typed values taken out of them.

    bytes -> text (size, UTF-8, no control characters) -> parser events -> Node tree -> `take_*`

A file holds one scenario, or several as YAML documents, each with a line `name: NAME`, of which
`FILE::NAME` is one. The tree is built from events, so that a limit stops the work when it is
reached. Narrower than YAML 1.1 where that surprises: string keys, each once, no anchors, merge
keys or tags, decimal and finite numbers only; a date is a text. `1e-3`, a string to YAML 1.1, is
taken where a number is due; but for that and for an integer there, nothing is converted. Refusals
are `ScenarioError`s.
"""

import codecs
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from harness.errors import ScenarioError, did_you_mean, shown
from harness.values import MAX_INT

MAX_FILE_BYTES, MAX_NODES, MAX_DEPTH = 1_000_000, 20_000, 20
MAX_SECONDS = 30 * 86400.0
"""Of any time that a scenario states: beyond, deadlines overflow."""
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_BETWEEN = re.compile(rb"^---(?:[ \t]+#.*|[ \t]*)\r?\n", re.MULTILINE)
_CONTENT = re.compile(rb"^\s*[^\s#%]", re.MULTILINE)
_NAME = re.compile(rb"^name:[ \t]*[\"']?([\w.-]+)", re.MULTILINE)
_DECIMAL = re.compile(r"[-+]?(0|[1-9](_?[0-9])*)")
_TAG = "tag:yaml.org,2002:"
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
"""What no report can hold; escapes in double quotes can smuggle it in."""
_NUMBER_CHARS = frozenset("0123456789+-.eE")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written: a file and line, or the name of an option (no line)."""

    file: str
    line: int | None = None

    def error(
        self, key: str, expected: str, got: str, *, legal: Iterable[object] = (), rule: str = ""
    ) -> ScenarioError:
        return ScenarioError(file=self.file, line=self.line, key=key, expected=expected, got=got,
                             legal=legal, rule=rule)  # fmt: skip

    def at(self, line: int) -> "Origin":
        """A line of this file, counted from 0, as parsers do. Options have no lines."""
        return self if self.line is None else Origin(self.file, line + 1)


@dataclass(frozen=True, slots=True)
class Node:
    """A value and where it starts.

    `value` is a scalar, a tuple of nodes, or a mapping of key to node, whose keys stand at `keys`;
    `raw` is a plain (unquoted) scalar's text as written, "" for anything else.
    """

    value: "str | int | float | bool | tuple[Node, ...] | dict[str, Node] | None"
    origin: Origin
    raw: str = ""
    keys: dict[str, Origin] = field(default_factory=dict)

    def plain(self) -> Any:
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        return [n.plain() for n in self.value] if isinstance(self.value, tuple) else self.value

    def shown(self) -> str:
        """The value as an error message shows it; says what YAML made of a bare word."""
        if isinstance(self.value, dict | tuple):
            kind = "mapping" if isinstance(self.value, dict) else "list"
            return f"the {kind} {shown(self.plain())}"
        said = shown(self.value)
        if isinstance(self.value, bool) and self.raw.lower() != said:
            return f"{said} (YAML reads a bare {self.raw} as a bool)"
        return said

    def refused(
        self, key: str, expected: str, *, got: str = "", legal: Iterable[object] = ()
    ) -> ScenarioError:
        return self.origin.error(key, expected, got or self.shown(), legal=legal)


# --- reading ----------------------------------------------------------------------------------


def read_bytes(path: Path) -> bytes:
    """A scenario file's bytes; not of a pipe, a device, or a file over `MAX_FILE_BYTES`."""
    origin = Origin(str(path))
    try:
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "not a regular file"
            raise origin.error("file", "a scenario file", kind if path.exists() else "no such file")
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1).removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise origin.error("file", "a readable file", shown(error.strerror)) from None
    if len(data) > MAX_FILE_BYTES:
        raise origin.error("file", f"at most {MAX_FILE_BYTES:,} bytes", "more")
    return data


def documents(path: Path) -> dict[Path, bytes]:
    """The scenarios that a path names: `FILE`, or `FILE::NAME` for each of several in a file.

    One of several is preceded by empty lines, as many as the file has before it: places stay.
    """
    file, _, wanted = str(path).partition("::")
    data, held, line = read_bytes(Path(file)), list[tuple[int, bytes]](), 0
    for part in _BETWEEN.split(data):
        held += [(line, part)] if _CONTENT.search(part) else []
        line += part.count(b"\n") + 1
    if len(held) < 2 and not wanted:
        return {path: data}
    found: dict[str, bytes] = {}
    for line, part in held:
        name = match[1].decode() if (match := _NAME.search(part)) else ""
        if not name or name in found:
            due, got = "a line `name: NAME` of its own in each of several documents", "none"
            raise Origin(file, line + 1).error("name", due, f"{name} again" if name else got)
        found[name] = b"\n" * line + part
    if wanted and wanted not in found:
        raise Origin(file).error("name", "a scenario of this file", shown(wanted), legal=found)
    return {Path(f"{file}::{name}"): text for name, text in found.items() if wanted in ("", name)}


def parse_bytes(data: bytes, origin: Origin) -> Node:
    """Decode UTF-8 and parse; `origin` names the file, or the option that the text came from."""
    try:
        return parse_text(data.decode(), origin)
    except UnicodeDecodeError as error:
        where, got = origin.at(data.count(b"\n", 0, error.start)), f"byte 0x{data[error.start]:02x}"
        raise where.error("file", "UTF-8 text", got) from None


def parse_text(text: str, origin: Origin) -> Node:
    """Parse one YAML document."""
    if control := _CONTROL.search(text):
        where = origin.at(text.count("\n", 0, control.start()))
        got = f"the control character 0x{ord(control.group()):02x}"
        raise where.error("file", "text", got)
    try:
        return _Reader(yaml.parse(text, Loader=_LOADER), origin).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where, problem = origin.at(mark.line) if mark else origin, error.problem or error.context
    except yaml.YAMLError as error:
        where, problem = origin, str(error)
    raise where.error("syntax", "valid YAML", f"an error: {problem}")


class _Reader:
    """Events to one Node tree; it may recurse, as depth is limited."""

    def __init__(self, events: Iterator[Any], source: Origin) -> None:
        self.events, self.source, self.total = events, source, 0

    def document(self) -> Node:
        root: Node | None = None
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise self._at(event).error("file", "one YAML document", "a second one")
                root = self._node(next(self.events), "", 1)
        if root is None:
            raise self.source.error("file", "a scenario", "an empty file")
        return root

    def _at(self, event: Any) -> Origin:
        return self.source.at(event.start_mark.line)

    def _node(self, event: Any, path: str, level: int) -> Node:
        """The node that begins with an event; `level` is that of a container in this place."""
        origin = self._at(event)
        self.total += 1
        if self.total > MAX_NODES:
            raise origin.error(path or "file", f"at most {MAX_NODES:,} values", "more")
        if event.anchor is not None:
            got = f"the {'alias *' if isinstance(event, yaml.AliasEvent) else 'anchor &'}"
            raise origin.error(path or "file", "values written out", f"{got}{event.anchor}")
        if event.tag is not None:
            name = shown(event.tag.replace(_TAG, "!!"))
            raise origin.error("syntax", "a value without a tag", f"the tag {name}")
        if isinstance(event, yaml.ScalarEvent):
            return _scalar(event, origin)
        if level > MAX_DEPTH:
            raise origin.error(path or "file", f"at most {MAX_DEPTH} levels", "deeper nesting")
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(origin, path, level)
        items = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self._node(event, path, level + 1))
        return Node(tuple(items), origin)

    def _mapping(self, origin: Origin, path: str, level: int) -> Node:
        entries: dict[str, Node] = {}
        keys: dict[str, Origin] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            if isinstance(event, yaml.CollectionStartEvent) and event.tag is None:
                got = "a list or mapping"
                raise self._at(event).error(path or "file", "a string key", got)
            key = self._node(event, path, 0)
            name, where = key.value, key.origin
            if not isinstance(name, str):
                raise where.error("syntax", "a string key, quoted", key.shown())
            if name == "<<" and key.raw:
                raise where.error(path or "file", "keys written out", "a merge key (<<)")
            inner = f"{path}.{name}" if path else name
            if name in keys:
                first = keys[name].line
                again = "it twice" if first is None else f"it again (first on line {first})"
                raise where.error(inner, "each key once", again)
            keys[name] = where
            entries[name] = self._node(next(self.events), inner, level + 1)
        return Node(entries, origin, keys=keys)


def _scalar(event: Any, origin: Origin) -> Node:
    """What a scalar means, by YAML 1.1's own patterns less its surprises."""
    text: str = event.value
    if bad := _CONTROL.search(text):
        raise origin.error("syntax", "text", f"the character {shown(bad.group())}")
    if not event.implicit[0]:  # in quotes
        return Node(text, origin)
    resolvers = yaml.SafeLoader.yaml_implicit_resolvers.get(text[:1], ())
    kind = next((tag.removeprefix(_TAG) for tag, form in resolvers if form.match(text)), "str")
    value: str | int | float | bool | None = text
    if kind == "null":
        value = None
    elif kind == "bool":
        value = text.lower() in ("yes", "true", "on")
    elif kind in ("int", "float"):
        value = _number(text, origin, whole=kind == "int")
    return Node(value, origin, text)


def _number(text: str, origin: Origin, *, whole: bool) -> int | float:
    # 017 is octal to YAML 1.1 and decimal to the reader, 1:30 is sexagesimal: refused, as is .nan.
    if not whole or _DECIMAL.fullmatch(text):
        with suppress(ValueError):
            number = int(text) if whole else float(text)
            if math.isfinite(number):
                return number
    raise origin.error("syntax", "a finite decimal number, or a quoted string", f"{text:.40}")


# --- typed values -----------------------------------------------------------------------------

Taker = Callable[[Node, str], Any]
"""From a node and its dotted key, which messages name, to the value."""


def dotted(parent: str, name: str) -> str:
    """`parent.name`, or `name` at the top of the file."""
    return f"{parent}.{name}" if parent not in ("", "file") else name


def unknown_key(name: str, origin: Origin, parent: str, legal: Iterable[str]) -> ScenarioError:
    """The error for a key that means nothing, with the closest that does."""
    got = f"{shown(name)}{did_you_mean(name, legal)}"
    return origin.error(dotted(parent, name), "a known key", got, legal=legal)


def take_mapping(
    node: Node, key: str, *, legal: Iterable[str] | None = None, required: Iterable[str] = (),
    may_be_empty: bool = True,
) -> dict[str, Node]:  # fmt: skip
    """A mapping with none but `legal` keys (any, if None) and all the `required` ones."""
    known = tuple(legal or ())
    if not isinstance(node.value, dict):
        raise node.refused(key, "a mapping", legal=known)
    for name in node.value if legal is not None else ():
        if name not in known:
            raise unknown_key(name, node.keys[name], key, known)
    for name in required:
        if name not in node.value:
            raise node.refused(dotted(key, name), "this key", got="nothing", legal=known)
    if not node.value and not may_be_empty:
        raise node.refused(key, "at least one key", got="an empty mapping", legal=known)
    return node.value


def take_fields(
    node: Node, key: str, fields: Mapping[str, Taker], *, required: Iterable[str] = ()
) -> dict[str, Any]:
    """The values of a mapping with none but the fields' keys, in the fields' order."""
    entries = take_mapping(node, key, legal=fields, required=required)
    return {name: taker(entries[name], dotted(key, name))
            for name, taker in fields.items() if name in entries}  # fmt: skip


def take_list(node: Node, key: str, what: str, *, may_be_empty: bool = False) -> tuple[Node, ...]:
    """A list; `what` says of what, for the message."""
    if not isinstance(node.value, tuple) or not (node.value or may_be_empty):
        got = "an empty list" if node.value == () else ""
        raise node.refused(key, f"a list of {what}", got=got)
    return node.value


def take_words(
    node: Node, key: str, *, what: str, legal: Iterable[str] = (), once: str = "",
    may_be_empty: bool = False,
) -> tuple[str, ...]:  # fmt: skip
    """A list of strings, each of `legal` if given; `once`: what each may be there but once."""
    nodes = take_list(node, key, what, may_be_empty=may_be_empty)
    words = tuple(take_str(each, key, legal=legal) for each in nodes)
    if once and len(set(words)) != len(words):
        raise node.refused(key, f"each {once} once")
    return words


def take_str(node: Node, key: str, *, legal: Iterable[str] = ()) -> str:
    """A string, one of `legal` if given."""
    if not isinstance(node.value, str):
        quoted = f'a string, "{node.raw}" in quotes' if node.raw else "a string"
        raise node.refused(key, quoted, legal=legal)
    if legal and node.value not in legal:
        got = node.shown() + did_you_mean(node.value, legal)
        raise node.refused(key, "one of the legal values", got=got, legal=legal)
    return node.value


def take_int(node: Node, key: str, *, least: int | None = None, most: int | None = None) -> int:
    """An integer of at most 64 bits, within bounds; a bool is not one."""
    expected = "an integer" if least is None else f"an integer >= {least}"
    expected = expected if most is None else f"an integer from {least} to {most}"
    value = node.value
    if isinstance(value, bool) or not isinstance(value, int):
        raise node.refused(key, expected)
    if not -MAX_INT < value < MAX_INT:
        raise node.refused(key, "an integer of at most 64 bits")
    if (least is not None and value < least) or (most is not None and value > most):
        raise node.refused(key, expected)
    return value


def take_float(
    node: Node, key: str, *, above: float | None = None, most: float = math.inf
) -> float:
    """A finite number, as a float; integers and the plain text `1e-3` count."""
    expected = "a number" if above is None else f"a number > {above:g}"
    number = math.nan
    if isinstance(node.value, int | float) and not isinstance(node.value, bool):
        number = float(node.value)
    elif node.raw and set(node.raw) <= _NUMBER_CHARS:
        with suppress(ValueError):
            number = float(node.raw)
    if not math.isfinite(number) or (above is not None and not number > above):
        raise node.refused(key, expected)
    if number > most:
        raise node.refused(key, f"{expected} and at most {most:.0f}")
    return number


def take_bool(node: Node, key: str) -> bool:
    """true or false (or what YAML 1.1 reads as such)."""
    if not isinstance(node.value, bool):
        raise node.refused(key, "a bool", legal=("true", "false"))
    return node.value


take_count: Taker = partial(take_int, least=1)
take_positive: Taker = partial(take_float, above=0)
take_seconds: Taker = partial(take_float, above=0, most=MAX_SECONDS)


def one_of(*legal: str) -> Taker:
    """Takes one of these words."""
    return partial(take_str, legal=legal)
