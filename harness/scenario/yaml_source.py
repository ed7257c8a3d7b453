"""YAML to plain values that remember where each was written, within limits.

    bytes -> text (size, UTF-8, no control characters) -> parser events -> Node tree

The tree is built from the event stream, not by PyYAML's composer, so that every limit stops the
work when it is reached: depth before a deep file can exhaust the stack, and the number of nodes
with each alias counted as often as it is used, so that anchors which explode are refused at once.

Narrower than YAML 1.1 where 1.1 surprises: one document, string keys, no key twice, no merge keys,
no tags but `!!str`, decimal integers only, finite numbers only, no dates. `1e-3` (a string to YAML
1.1) stays a string here; the decoder takes it where a number is due.
"""

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from harness.errors import ScenarioError, shown

MAX_FILE_BYTES = 1_000_000
MAX_NODES = 20_000
MAX_DEPTH = 20
MAX_NUMBER_CHARS = 40

Scalar = str | int | float | bool | None

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_TAG = "tag:yaml.org,2002:"
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
"""What escapes in double quotes can smuggle in and no report can hold: NUL, half a surrogate."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written: a file and line, or the name of an option (no line)."""

    file: str
    line: int | None = None

    def error(
        self, key: str, *, expected: str, got: str, legal: tuple[object, ...] = (), rule: str = ""
    ) -> ScenarioError:
        """The error to raise for `key` at this place."""
        return ScenarioError(
            file=self.file, line=self.line, key=key, expected=expected, got=got, legal=legal,
            rule=rule,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Node:
    """A value and where it stands.

    Attributes:
        value: a scalar, a tuple of nodes, or a mapping of key to node.
        origin: where the value starts.
        raw: a plain (unquoted) scalar's text as written; "" for anything else.
        keys: where each key of a mapping stands.
        size: number of nodes, aliases expanded.
        depth: levels below this one, itself included.
    """

    value: "Scalar | tuple[Node, ...] | dict[str, Node]"
    origin: Origin
    raw: str = ""
    keys: dict[str, Origin] = field(default_factory=dict)
    size: int = 1
    depth: int = 1

    def plain(self) -> Any:
        """The value without its origins."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, tuple):
            return [node.plain() for node in self.value]
        return self.value

    def shown(self) -> str:
        """The value as an error message shows it; says what YAML made of a bare word."""
        if isinstance(self.value, dict):
            return f"the mapping {shown(self.plain())}"
        if isinstance(self.value, tuple):
            return f"the list {shown(self.plain())}"
        if self.value is None:
            return "nothing"
        if isinstance(self.value, bool):
            said = str(self.value).lower()
            if self.raw.lower() == said:
                return said
            return f"{said} (YAML reads a bare {self.raw} as a bool)"
        return shown(self.value)


def read_bytes(path: Path) -> bytes:
    """A scenario file's bytes.

    Raises:
        ScenarioError: missing, not a regular file, unreadable, or larger than the limit.
    """
    origin = Origin(str(path))
    try:
        status = path.stat()
        kind = _not_a_file(status.st_mode)
        size, data = status.st_size, b""
        if not kind and size <= MAX_FILE_BYTES:
            with path.open("rb") as stream:
                # One byte more than allowed: the file may have grown since stat, or lie (/proc).
                data = stream.read(MAX_FILE_BYTES + 1)
                size = max(size, len(data))
    except FileNotFoundError:
        raise origin.error("file", expected="a scenario file", got="no such file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise origin.error("file", expected="a readable file", got=shown(reason)) from None
    if kind:
        raise origin.error("file", expected="a scenario file", got=kind)
    if size > MAX_FILE_BYTES:
        raise origin.error(
            "file", expected=f"at most {MAX_FILE_BYTES:,} bytes", got=f"{size:,} bytes"
        )
    return data


def _not_a_file(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    return "" if stat.S_ISREG(mode) else "not a regular file"


def parse_bytes(data: bytes, origin: Origin) -> Node:
    """Decode UTF-8 and parse; `origin` names the file, or the option that the text came from.

    Raises:
        ScenarioError: not UTF-8, binary, not YAML, or past a limit of this module.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = _at_line(origin, data.count(b"\n", 0, error.start))
        raise where.error(
            "file", expected="UTF-8 text", got=f"byte 0x{data[error.start]:02x}"
        ) from None
    return parse_text(text, origin)


def parse_text(text: str, origin: Origin) -> Node:
    """Parse one YAML document.

    Raises:
        ScenarioError: binary, not YAML, or past a limit of this module.
    """
    if control := _CONTROL.search(text):
        where = _at_line(origin, text.count("\n", 0, control.start()))
        code = ord(control.group())
        raise where.error("file", expected="text", got=f"the control character 0x{code:02x}")
    try:
        return _Builder(origin).build(yaml.parse(text, Loader=_LOADER))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = _at_line(origin, mark.line) if mark else origin
        problem = f"an error: {error.problem or error.context}"
        raise where.error("syntax", expected="valid YAML", got=problem) from None
    except yaml.YAMLError as error:
        raise origin.error("syntax", expected="valid YAML", got=f"an error: {error}") from None


def _at_line(origin: Origin, line: int) -> Origin:
    """`line` counts from 0, as parsers do. Options have no lines."""
    return origin if origin.line is None else Origin(origin.file, line + 1)


@dataclass
class _Open:
    """A container that is still being read. `key` waits for its value."""

    origin: Origin
    mapping: bool
    anchor: str | None
    items: list[Node] = field(default_factory=list)
    entries: dict[str, Node] = field(default_factory=dict)
    keys: dict[str, Origin] = field(default_factory=dict)
    key: str | None = None

    def close(self) -> Node:
        children = list(self.entries.values()) if self.mapping else self.items
        return Node(
            value=self.entries if self.mapping else tuple(self.items),
            origin=self.origin,
            keys=self.keys,
            size=1 + len(self.keys) + sum(child.size for child in children),
            depth=1 + max((child.depth for child in children), default=0),
        )


class _Builder:
    """Events to one Node tree. `self.total` is the number of nodes so far, aliases expanded."""

    def __init__(self, origin: Origin) -> None:
        self.source = origin
        self.open: list[_Open] = []
        self.anchors: dict[str, Node] = {}
        self.total = 0
        self.root: Node | None = None
        self.documents = 0

    def build(self, events: Iterator[Any]) -> Node:
        for event in events:
            origin = _at_line(self.source, event.start_mark.line)
            if isinstance(event, yaml.DocumentStartEvent):
                self.documents += 1
                if self.documents > 1:
                    raise origin.error("file", expected="one YAML document", got="a second one")
            elif isinstance(event, yaml.AliasEvent):
                self._alias(event, origin)
            elif isinstance(event, yaml.ScalarEvent):
                node = _scalar(event, origin, as_key=self._key_due())
                self._count(1, origin)
                self._add(node, event.anchor)
            elif isinstance(event, yaml.CollectionStartEvent):
                self._start(event, origin)
            elif isinstance(event, yaml.CollectionEndEvent):
                closing = self.open.pop()
                self._add(closing.close(), closing.anchor)
        if self.root is None:
            raise self.source.error("file", expected="a scenario", got="an empty file")
        return self.root

    def _start(self, event: Any, origin: Origin) -> None:
        if event.tag is not None:
            _refuse_tag(event.tag, origin)
        if self._key_due():
            raise origin.error(self._path(), expected="a string key", got="a list or mapping")
        self._count(1, origin)
        mapping = isinstance(event, yaml.MappingStartEvent)
        self.open.append(_Open(origin, mapping, event.anchor))
        self._limit_depth(0, origin)

    def _alias(self, event: Any, origin: Origin) -> None:
        node = self.anchors.get(event.anchor)
        if node is None:
            raise origin.error(
                self._path(), expected="an anchor defined above", got=f"*{event.anchor}"
            )
        self._count(node.size, origin)
        self._limit_depth(node.depth, origin)
        if self._key_due() and not isinstance(node.value, str):
            raise origin.error(self._path(), expected="a string key", got=f"*{event.anchor}")
        self._add(Node(node.value, origin, node.raw, node.keys, node.size, node.depth), None)

    def _add(self, node: Node, anchor: str | None) -> None:
        if anchor is not None:
            self.anchors[anchor] = node
        if not self.open:
            self.root = node
            return
        parent = self.open[-1]
        if not parent.mapping:
            parent.items.append(node)
        elif parent.key is None:
            self._start_entry(parent, node)
        else:
            parent.entries[parent.key] = node
            parent.key = None

    def _start_entry(self, parent: _Open, node: Node) -> None:
        key = str(node.value)
        if key == "<<" and node.raw:
            raise node.origin.error(
                self._path(), expected="keys written out", got="a merge key (<<)"
            )
        if key in parent.keys:
            first = parent.keys[key].line
            raise node.origin.error(
                self._path(key),
                expected="each key once",
                got="it twice" if first is None else f"it again (first on line {first})",
            )
        parent.keys[key] = node.origin
        parent.key = key

    def _key_due(self) -> bool:
        return bool(self.open) and self.open[-1].mapping and self.open[-1].key is None

    def _count(self, nodes: int, origin: Origin) -> None:
        self.total += nodes
        if self.total > MAX_NODES:
            raise origin.error(
                self._path(),
                expected=f"at most {MAX_NODES:,} values, aliases expanded",
                got=f"at least {self.total:,}",
            )

    def _limit_depth(self, below: int, origin: Origin) -> None:
        if len(self.open) + below > MAX_DEPTH:
            raise origin.error(
                self._path(), expected=f"at most {MAX_DEPTH} levels", got="deeper nesting"
            )

    def _path(self, key: str | None = None) -> str:
        keys = [entry.key for entry in self.open if entry.key is not None]
        return ".".join([*keys, *([key] if key is not None else [])]) or "file"


def _refuse_tag(tag: str, origin: Origin) -> NoReturn:
    name = tag.replace(_TAG, "!!")
    raise origin.error("syntax", expected="a value without a tag", got=f"the tag {shown(name)}")


def _scalar(event: Any, origin: Origin, *, as_key: bool) -> Node:
    text: str = event.value
    if bad := _UNWRITABLE.search(text):
        raise origin.error("syntax", expected="text", got=f"the character {shown(bad.group())}")
    if event.tag is not None:
        if event.tag != f"{_TAG}str":
            _refuse_tag(event.tag, origin)
        return Node(text, origin)
    if not event.implicit[0]:
        return Node(text, origin)
    value = _resolve(text, origin)
    if as_key and not isinstance(value, str):
        got = Node(value, origin, text).shown()
        raise origin.error("syntax", expected="a string key, quoted", got=got)
    return Node(value, origin, text)


def _resolve(text: str, origin: Origin) -> Scalar:
    """What a plain scalar means, by YAML 1.1's own patterns less its surprises."""
    tag = f"{_TAG}str"
    for candidate, pattern in yaml.SafeLoader.yaml_implicit_resolvers.get(text[:1], ()):
        if pattern.match(text):
            tag = candidate
            break
    kind = tag.removeprefix(_TAG)
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() in ("yes", "true", "on")
    if kind in ("int", "float"):
        return _number(text, origin, whole=kind == "int")
    if kind == "timestamp":
        raise origin.error("syntax", expected="a quoted string", got=f"the date {text}")
    return text


def _number(text: str, origin: Origin, *, whole: bool) -> int | float:
    if len(text) > MAX_NUMBER_CHARS:
        raise origin.error("syntax", expected="a number of readable length", got=shown(text))
    if whole and _DECIMAL.fullmatch(text):
        return int(text)
    try:
        number = float(text)
    except ValueError:  # .nan, .inf, 1:30 (sexagesimal), 0x1f
        number = float("nan")
    # 017 is octal to YAML 1.1 and decimal to the reader: nobody may be surprised by a seed of 15.
    octal = whole and number == number
    if octal or number - number != 0:
        raise origin.error(
            "syntax", expected="a finite decimal number, or a quoted string", got=text
        )
    return number
