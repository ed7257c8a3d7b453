"""Taking typed values out of YAML nodes, or saying exactly what is wrong with them.

Strict on purpose: nothing is converted but an integer where a number is due, and the text `1e-3`
(a string to YAML 1.1) where a number is due. A bool is never an integer, a number never a string.
"""

import math
from collections.abc import Iterable

from harness.errors import ScenarioError, did_you_mean
from harness.scenario.yaml_source import Node, Origin

MAX_INT = 2**63 - 1
MAX_SECONDS = 30 * 86400.0
"""Of any time that a scenario states: beyond, deadlines overflow."""
_NUMBER_CHARS = frozenset("0123456789+-.eE")


def refuse(
    node: Node, key: str, expected: str, *, legal: Iterable[object] = (), got: str = ""
) -> ScenarioError:
    """The error for a value that is not as expected."""
    return node.origin.error(key, expected=expected, got=got or node.shown(), legal=tuple(legal))


def take_mapping(
    node: Node, key: str, *, legal: Iterable[str] | None = None, required: Iterable[str] = ()
) -> dict[str, Node]:
    """A mapping with none but `legal` keys (any, if None) and all the `required` ones.

    Raises:
        ScenarioError: not a mapping, or a key unknown or missing.
    """
    if not isinstance(node.value, dict):
        raise refuse(node, key, "a mapping", legal=legal or ())
    for name in node.value if legal is not None else ():
        legal = tuple(legal or ())
        if name not in legal:
            raise unknown_key(name, node.keys[name], key, legal)
    for name in required:
        if name not in node.value:
            raise node.origin.error(
                dotted(key, name), expected="this key", got="nothing", legal=tuple(legal or ())
            )
    return node.value


def unknown_key(name: str, origin: Origin, parent: str, legal: Iterable[str]) -> ScenarioError:
    """The error for a key that means nothing, with the closest that does."""
    legal = tuple(legal)
    return origin.error(
        dotted(parent, name),
        expected="a known key",
        got=f"{Node(name, origin).shown()}{did_you_mean(name, legal)}",
        legal=legal,
    )


def dotted(parent: str, name: str) -> str:
    """`parent.name`, or `name` at the top of the file."""
    return f"{parent}.{name}" if parent not in ("", "file") else name


def take_list(node: Node, key: str, what: str) -> tuple[Node, ...]:
    """A non-empty list; `what` says of what, for the message."""
    if not isinstance(node.value, tuple):
        raise refuse(node, key, f"a list of {what}")
    if not node.value:
        raise refuse(node, key, f"a list of {what}", got="an empty list")
    return node.value


def take_str(node: Node, key: str, *, legal: Iterable[str] = ()) -> str:
    """A string, one of `legal` if given."""
    legal = tuple(legal)
    if not isinstance(node.value, str):
        quoted = "a string" if node.raw == "" else f'a string, "{node.raw}" in quotes'
        raise refuse(node, key, quoted, legal=legal)
    if legal and node.value not in legal:
        raise refuse(
            node,
            key,
            "one of the legal values",
            got=node.shown() + did_you_mean(node.value, legal),
            legal=legal,
        )
    return node.value


def take_int(node: Node, key: str, *, minimum: int | None = None) -> int:
    """An integer of at most 64 bits; a bool is not one."""
    expected = "an integer" if minimum is None else f"an integer >= {minimum}"
    if isinstance(node.value, bool) or not isinstance(node.value, int):
        raise refuse(node, key, expected)
    if abs(node.value) > MAX_INT:
        raise refuse(node, key, "an integer of at most 64 bits")
    if minimum is not None and node.value < minimum:
        raise refuse(node, key, expected)
    return node.value


def take_float(
    node: Node, key: str, *, above: float | None = None, most: float = math.inf
) -> float:
    """A finite number, as a float; integers and the plain text `1e-3` count."""
    expected = "a number" if above is None else f"a number > {above:g}"
    number: float | None = None
    if isinstance(node.value, int | float) and not isinstance(node.value, bool):
        number = float(node.value)
    elif node.raw and set(node.raw) <= _NUMBER_CHARS:
        number = _exponent(node.raw)
    if number is None or number - number != 0 or (above is not None and not number > above):
        raise refuse(node, key, expected)
    if number > most:
        raise refuse(node, key, f"{expected} and at most {most:.0f}")
    return number


def _exponent(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def take_bool(node: Node, key: str) -> bool:
    """true or false (or what YAML 1.1 reads as such)."""
    if not isinstance(node.value, bool):
        raise refuse(node, key, "a bool", legal=("true", "false"))
    return node.value
