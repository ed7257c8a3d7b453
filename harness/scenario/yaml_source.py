"""YAML to plain values that remember where each was written, within limits.

    bytes -> text (size, UTF-8, no control characters) -> parser events -> Node tree

The tree is built from events, so that every limit stops the work when it is reached: depth before
a deep file can exhaust the stack, values with each alias counted as often as it is used.

Narrower than YAML 1.1 where 1.1 surprises: one document, string keys, no key twice, no merge keys,
no tags but `!!str`, decimal integers only, finite numbers only, no dates. `1e-3` (a string to YAML
1.1) stays a string here; the decoder takes it where a number is due.
"""

import dataclasses
import io
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from harness.errors import ScenarioError, shown

MAX_FILE_BYTES, MAX_NODES, MAX_DEPTH, MAX_NUMBER_CHARS = 1_000_000, 20_000, 20, 40
Scalar = str | int | float | bool | None
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DECIMAL = re.compile(r"[-+]?(0|[1-9](_?[0-9])*)")
_TAG = "tag:yaml.org,2002:"
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
"""What no report can hold; escapes in double quotes can smuggle it in."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written: a file and line, or the name of an option (no line)."""

    file: str
    line: int | None = None

    def error(
        self, key: str, expected: str, got: str, *, legal: tuple[object, ...] = (), rule: str = ""
    ) -> ScenarioError:
        """The error to raise for `key` at this place."""
        return ScenarioError(
            file=self.file, line=self.line, key=key, expected=expected, got=got, legal=legal,
            rule=rule,
        )  # fmt: skip

    def at(self, line: int) -> "Origin":
        """A line of this file, counted from 0, as parsers do. Options have no lines."""
        return self if self.line is None else Origin(self.file, line + 1)


@dataclass(frozen=True, slots=True)
class Node:
    """A value and where it stands.

    Attributes:
        value: a scalar, a tuple of nodes, or a mapping of key to node.
        origin: where the value starts.
        raw: a plain (unquoted) scalar's text as written; "" for anything else.
        keys: where each key of a mapping stands.
    """

    value: "Scalar | tuple[Node, ...] | dict[str, Node]"
    origin: Origin
    raw: str = ""
    keys: dict[str, Origin] = field(default_factory=dict)

    def plain(self) -> Any:
        """The value without its origins."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, tuple):
            return [node.plain() for node in self.value]
        return self.value

    def shown(self) -> str:
        """The value as an error message shows it; says what YAML made of a bare word."""
        if isinstance(self.value, dict | tuple):
            kind = "mapping" if isinstance(self.value, dict) else "list"
            return f"the {kind} {shown(self.plain())}"
        said = shown(self.value)
        if isinstance(self.value, bool) and self.raw.lower() != said:
            return f"{said} (YAML reads a bare {self.raw} as a bool)"
        return said


def read_bytes(path: Path) -> bytes:
    """A scenario file's bytes.

    Raises:
        ScenarioError: missing, not a regular file, unreadable, or larger than the limit.
    """
    origin = Origin(str(path))
    try:
        status = path.stat()
        is_file = stat.S_ISREG(status.st_mode)
        with path.open("rb") if is_file else io.BytesIO() as stream:
            # One byte more than allowed: the file may have grown since stat, or lie (/proc).
            data = stream.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise origin.error("file", "a scenario file", "no such file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise origin.error("file", "a readable file", shown(reason)) from None
    if not is_file:
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
        raise origin.error("file", "a scenario file", kind)
    if (size := max(status.st_size, len(data))) > MAX_FILE_BYTES:
        most = f"at most {MAX_FILE_BYTES:,} bytes"
        raise origin.error("file", most, f"{size:,} bytes")
    return data


def parse_bytes(data: bytes, origin: Origin) -> Node:
    """Decode UTF-8 and parse; `origin` names the file, or the option that the text came from.

    Raises:
        ScenarioError: not UTF-8, binary, not YAML, or past a limit of this module.
    """
    try:
        return parse_text(data.decode("utf-8-sig"), origin)
    except UnicodeDecodeError as error:
        where = origin.at(data.count(b"\n", 0, error.start))
        got = f"byte 0x{data[error.start]:02x}"
        raise where.error("file", "UTF-8 text", got) from None


def parse_text(text: str, origin: Origin) -> Node:
    """Parse one YAML document (`ScenarioError`: binary, not YAML, or past a limit)."""
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
    """Events to one Node tree; it may recurse, as depth is limited.

    `total` is the number of values so far, keys included and aliases expanded.
    """

    def __init__(self, events: Iterator[Any], source: Origin) -> None:
        self.events, self.source, self.total = events, source, 0
        self.anchors: dict[str, Node] = {}

    def document(self) -> Node:
        """The only document that there is."""
        root: Node | None = None
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    where = self._at(event)
                    raise where.error("file", "one YAML document", "a second one")
                root = self._node(next(self.events), "", 1)
        if root is None:
            raise self.source.error("file", "a scenario", "an empty file")
        return root

    def _at(self, event: Any) -> Origin:
        return self.source.at(event.start_mark.line)

    def _node(self, event: Any, path: str, level: int) -> Node:
        """The node that begins with an event; `level` is that of a container in this place."""
        origin = self._at(event)
        if isinstance(event, yaml.AliasEvent):
            if (node := self.anchors.get(event.anchor or "")) is None:
                expected = "an anchor defined above"
                raise origin.error(path or "file", expected, f"*{event.anchor}")
            size, levels = _measure(node)
            self._limit(size, level + levels - 1, origin, path)
            return dataclasses.replace(node, origin=origin)
        if isinstance(event, yaml.ScalarEvent):
            self._limit(1, 0, origin, path)
            node = _scalar(event, origin)
        else:
            _refuse_tag(event.tag, origin)
            self._limit(1, level, origin, path)
            is_list = isinstance(event, yaml.SequenceStartEvent)
            node = (self._list if is_list else self._mapping)(origin, path, level)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def _list(self, origin: Origin, path: str, level: int) -> Node:
        items = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self._node(event, path, level + 1))
        return Node(tuple(items), origin)

    def _mapping(self, origin: Origin, path: str, level: int) -> Node:
        entries: dict[str, Node] = {}
        keys: dict[str, Origin] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key, where = self._key(event, path), self._at(event)
            inner = f"{path}.{key}" if path else key
            if key in keys:
                first = keys[key].line
                again = "it twice" if first is None else f"it again (first on line {first})"
                raise where.error(inner, "each key once", again)
            keys[key] = where
            entries[key] = self._node(next(self.events), inner, level + 1)
        return Node(entries, origin, keys=keys)

    def _key(self, event: Any, path: str) -> str:
        origin, key, expected = self._at(event), path or "file", "a string key"
        if isinstance(event, yaml.CollectionStartEvent):
            _refuse_tag(event.tag, origin)
            raise origin.error(key, expected, "a list or mapping")
        node = self._node(event, path, 0)
        if not isinstance(node.value, str):
            if isinstance(event, yaml.AliasEvent):
                raise origin.error(key, expected, f"*{event.anchor}")
            raise origin.error("syntax", f"{expected}, quoted", node.shown())
        if node.value == "<<" and node.raw:
            raise origin.error(key, "keys written out", "a merge key (<<)")
        return node.value

    def _limit(self, values: int, level: int, origin: Origin, path: str) -> None:
        self.total += values
        if self.total > MAX_NODES:
            most = f"at most {MAX_NODES:,} values, aliases expanded"
            raise origin.error(path or "file", most, f"at least {self.total:,}")
        if level > MAX_DEPTH:
            most = f"at most {MAX_DEPTH} levels"
            raise origin.error(path or "file", most, "deeper nesting")


def _measure(node: Node) -> tuple[int, int]:
    """Values, keys included, and levels of containers. It takes no longer than was counted."""
    if not isinstance(node.value, dict | tuple):
        return 1, 0
    held = node.value.values() if isinstance(node.value, dict) else node.value
    inner = [_measure(child) for child in held]
    size = 1 + len(node.keys) + sum(each for each, _ in inner)
    return size, 1 + max((levels for _, levels in inner), default=0)


def _refuse_tag(tag: str | None, origin: Origin) -> None:
    if tag is not None:
        name = shown(tag.replace(_TAG, "!!"))
        raise origin.error("syntax", "a value without a tag", f"the tag {name}")


def _scalar(event: Any, origin: Origin) -> Node:
    """What a scalar means, by YAML 1.1's own patterns less its surprises."""
    text: str = event.value
    if bad := _CONTROL.search(text):
        raise origin.error("syntax", "text", f"the character {shown(bad.group())}")
    if event.tag != f"{_TAG}str":
        _refuse_tag(event.tag, origin)
    if event.tag is not None or not event.implicit[0]:
        return Node(text, origin)
    resolvers = yaml.SafeLoader.yaml_implicit_resolvers.get(text[:1], ())
    tag = next((tag for tag, pattern in resolvers if pattern.match(text)), "")
    kind = tag.removeprefix(_TAG)
    value: Scalar = text
    if kind == "null":
        value = None
    elif kind == "bool":
        value = text.lower() in ("yes", "true", "on")
    elif kind in ("int", "float"):
        value = _number(text, origin, whole=kind == "int")
    elif kind == "timestamp":
        raise origin.error("syntax", "a quoted string", f"the date {text}")
    return Node(value, origin, text)


def _number(text: str, origin: Origin, *, whole: bool) -> int | float:
    if len(text) > MAX_NUMBER_CHARS:
        raise origin.error("syntax", "a number of readable length", shown(text))
    if whole and _DECIMAL.fullmatch(text):
        return int(text)
    try:
        number = float(text)
    except ValueError:  # .nan, .inf, 1:30 (sexagesimal), 0x1f
        number = float("nan")
    # 017 is octal to YAML 1.1 and decimal to the reader: nobody may be surprised by a seed of 15.
    if whole or number - number != 0:
        expected = "a finite decimal number, or a quoted string"
        raise origin.error("syntax", expected, text)
    return number
