"""Taking typed values out of YAML nodes, or saying exactly what is wrong with them.

A section is a table of `Key`s: what each holds, and what it means. `take_fields` refuses keys that
are not in the table and has each key look at its value. Every refusal is a `ScenarioError`.

Strict on purpose: nothing is converted but an integer where a number is due, and the text `1e-3`
(a string to YAML 1.1) where a number is due. A bool is never an integer, a number never a string.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from harness.codec import MAX_INT
from harness.errors import ScenarioError, did_you_mean
from harness.scenario.yaml_source import Node, Origin

MAX_SECONDS = 30 * 86400.0
"""Of any time that a scenario states: beyond, deadlines overflow."""
_NUMBER_CHARS = frozenset("0123456789+-.eE")
Taker = Callable[[Node, str], Any]
"""From a node and its dotted key, which messages name, to the value."""


@dataclass(frozen=True)
class Key:
    """A key of a section: how its value is taken, and what it means. Defaults are the section's."""

    take: Taker
    doc: str


def refuse(
    node: Node, key: str, expected: str, *, legal: Iterable[object] = (), got: str = ""
) -> ScenarioError:
    """The error for a value that is not as expected."""
    return node.origin.error(key, expected, got or node.shown(), legal=tuple(legal))


def unknown_key(name: str, origin: Origin, parent: str, legal: Iterable[str]) -> ScenarioError:
    """The error for a key that means nothing, with the closest that does."""
    legal = tuple(legal)
    got = f"{Node(name, origin).shown()}{did_you_mean(name, legal)}"
    return origin.error(dotted(parent, name), "a known key", got, legal=legal)


def dotted(parent: str, name: str) -> str:
    """`parent.name`, or `name` at the top of the file."""
    return f"{parent}.{name}" if parent not in ("", "file") else name


def take_mapping(
    node: Node, key: str, *, legal: Iterable[str] | None = None, required: Iterable[str] = (),
    may_be_empty: bool = True,
) -> dict[str, Node]:  # fmt: skip
    """A mapping with none but `legal` keys (any, if None) and all the `required` ones."""
    known = None if legal is None else tuple(legal)
    if not isinstance(node.value, dict):
        raise refuse(node, key, "a mapping", legal=known or ())
    for name in node.value:
        if known is not None and name not in known:
            raise unknown_key(name, node.keys[name], key, known)
    for name in required:
        if name not in node.value:
            where = dotted(key, name)
            raise node.origin.error(where, "this key", "nothing", legal=known or ())
    if not node.value and not may_be_empty:
        raise refuse(node, key, "at least one key", got="an empty mapping", legal=known or ())
    return node.value


def take_fields(
    node: Node, key: str, fields: Mapping[str, Key], *, required: Iterable[str] = ()
) -> dict[str, Any]:
    """The values of a mapping with none but the fields' keys, in the fields' order."""
    entries = take_mapping(node, key, legal=fields, required=required)
    return {
        name: field.take(entries[name], dotted(key, name))
        for name, field in fields.items()
        if name in entries
    }


def take_list(node: Node, key: str, what: str, *, may_be_empty: bool = False) -> tuple[Node, ...]:
    """A list; `what` says of what, for the message."""
    if not isinstance(node.value, tuple):
        raise refuse(node, key, f"a list of {what}")
    if not node.value and not may_be_empty:
        raise refuse(node, key, f"a list of {what}", got="an empty list")
    return node.value


def take_words(
    node: Node, key: str, *, what: str, legal: Iterable[str] = (), once: str = "",
    may_be_empty: bool = False,
) -> tuple[str, ...]:  # fmt: skip
    """A list of strings, each of `legal` if given; `once`: what each may be there but once."""
    nodes = take_list(node, key, what, may_be_empty=may_be_empty)
    words = tuple(take_str(each, key, legal=legal) for each in nodes)
    if once and len(set(words)) != len(words):
        raise refuse(node, key, f"each {once} once")
    return words


def take_str(node: Node, key: str, *, legal: Iterable[str] = ()) -> str:
    """A string, one of `legal` if given."""
    legal = tuple(legal)
    if not isinstance(node.value, str):
        quoted = "a string" if node.raw == "" else f'a string, "{node.raw}" in quotes'
        raise refuse(node, key, quoted, legal=legal)
    if legal and node.value not in legal:
        got = node.shown() + did_you_mean(node.value, legal)
        raise refuse(node, key, "one of the legal values", got=got, legal=legal)
    return node.value


def take_int(node: Node, key: str, *, least: int | None = None, most: int | None = None) -> int:
    """An integer of at most 64 bits, within bounds; a bool is not one."""
    expected = "an integer" if least is None else f"an integer >= {least}"
    if most is not None:
        expected = f"an integer from {least} to {most}"
    if isinstance(node.value, bool) or not isinstance(node.value, int):
        raise refuse(node, key, expected)
    if not -MAX_INT < node.value < MAX_INT:
        raise refuse(node, key, "an integer of at most 64 bits")
    if not (node.value if least is None else least) <= node.value <= (most or MAX_INT):
        raise refuse(node, key, expected)
    return node.value


def take_float(
    node: Node, key: str, *, above: float | None = None, most: float = math.inf
) -> float:
    """A finite number, as a float; integers and the plain text `1e-3` count."""
    expected = "a number" if above is None else f"a number > {above:g}"
    number = math.nan
    if isinstance(node.value, int | float) and not isinstance(node.value, bool):
        number = float(node.value)
    elif node.raw and set(node.raw) <= _NUMBER_CHARS:
        with contextlib.suppress(ValueError):
            number = float(node.raw)
    if not math.isfinite(number) or (above is not None and not number > above):
        raise refuse(node, key, expected)
    if number > most:
        raise refuse(node, key, f"{expected} and at most {most:.0f}")
    return number


def take_bool(node: Node, key: str) -> bool:
    """true or false (or what YAML 1.1 reads as such)."""
    if not isinstance(node.value, bool):
        raise refuse(node, key, "a bool", legal=("true", "false"))
    return node.value


take_count: Taker = partial(take_int, least=1)
take_positive: Taker = partial(take_float, above=0)
take_seconds: Taker = partial(take_float, above=0, most=MAX_SECONDS)


def one_of(*legal: str) -> Taker:
    """Takes one of these words."""
    return partial(take_str, legal=legal)
