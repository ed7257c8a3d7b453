"""Strict JSON round trip of frozen dataclasses: what does not fit its type is an error."""

import copy
import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Self


class RecordError(ValueError):
    """A record that does not decode; it is reported, never trusted."""


class Json:
    """Mixin: strict JSON round trip of a frozen dataclass, by its field types."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON-ready values."""
        plain: dict[str, Any] = _plain(self)
        return plain

    @classmethod
    def from_json(cls, plain: object) -> Self:
        """Rebuild from `to_json`'s output.

        Raises:
            RecordError: not a mapping, unknown or missing key, or a value of the wrong type.
        """
        return typing.cast("Self", _decode(cls, plain, cls.__name__))


def dumps(value: Json | Mapping[str, Any]) -> str:
    """One line of JSON with sorted keys and no NaN."""
    plain = value.to_json() if isinstance(value, Json) else value
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


MAX_INT = 1 << 63
MAX_DEPTH = 64
"""Values nested deeper than this come of damage: whoever walks them would run out of stack."""


def strict_loads(text: str) -> Any:
    """JSON without what its readers disagree on, or cannot hold.

    Raises:
        ValueError: not JSON, a key twice in one object, a number that is not finite, or deep nests.
        RecursionError: nests deeper than the reader's own stack.
    """
    value = json.loads(
        text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_once
    )
    check_depth(value)
    return value


def check_depth(value: object) -> None:
    """See that a value is nested no deeper than `MAX_DEPTH` (`ValueError`)."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for entry in level
            if isinstance(entry, dict | list)
            for inner in (entry.values() if isinstance(entry, dict) else entry)
        ]
        if not level:
            return
    raise ValueError(f"nested deeper than {MAX_DEPTH}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice in one object")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if value in (math.inf, -math.inf):
        raise ValueError(f"{text} is too large")
    return value


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


_LEAVES = (str, int, float, bool, types.NoneType)


def _plain(value: Any) -> Any:
    """As `dataclasses.asdict`, in a tenth of the time: matrices have specifications by the 10,000.

    Containers are new ones, so that who gets them may change them.
    """
    kind: Any = type(value)
    if kind in _LEAVES:
        return value
    if kind is dict:
        return {key: entry if type(entry) in _LEAVES else _plain(entry)
                for key, entry in value.items()}  # fmt: skip
    if kind is list or kind is tuple:
        return kind(_plain(entry) for entry in value)
    if isinstance(value, Json):
        return {name: _plain(getattr(value, name)) for name in _names(kind)}
    return copy.deepcopy(value)


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(kind))


def _decode(kind: Any, value: object, where: str) -> object:
    origin = typing.get_origin(kind)
    if kind is Any:
        return value
    if origin is Literal:
        if value not in typing.get_args(kind):
            raise RecordError(f"{where}: expected one of {typing.get_args(kind)}, got {value!r}")
        return value
    if origin in (typing.Union, types.UnionType):
        return _decode_union(kind, value, where)
    if origin in (tuple, dict):
        return _decode_container(origin, typing.get_args(kind), value, where)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, where)
    return _decode_scalar(kind, value, where)


def _decode_container(origin: Any, items: tuple[Any, ...], value: object, where: str) -> object:
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise RecordError(f"{where}: expected a list, got {value!r}")
        return tuple(_decode(items[0], entry, f"{where}[{i}]") for i, entry in enumerate(value))
    if not isinstance(value, Mapping):
        raise RecordError(f"{where}: expected a mapping, got {value!r}")
    return {str(key): _decode(items[1], entry, f"{where}.{key}") for key, entry in value.items()}


def _decode_union(kind: Any, value: object, where: str) -> object:
    options = typing.get_args(kind)
    if value is None and type(None) in options:
        return None
    left = [option for option in options if option is not type(None)]
    if len(left) > 1:  # a word, or a mapping in its place
        is_mapping = isinstance(value, Mapping)
        left = [o for o in left if (typing.get_origin(o) is dict) == is_mapping]
    (option,) = left
    return _decode(option, value, where)


def _decode_dataclass(kind: Any, value: object, where: str) -> object:
    if not isinstance(value, Mapping):
        raise RecordError(f"{where}: expected a mapping, got {value!r}")
    fields, hints = _fields(kind)
    if unknown := sorted(set(value) - set(fields)):
        raise RecordError(f"{where}: unknown keys {unknown}")
    values = {}
    for name, entry in fields.items():
        if name in value:
            values[name] = _decode(hints[name], value[name], f"{where}.{name}")
        elif entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING:
            raise RecordError(f"{where}: missing key {name!r}")
    try:
        return kind(**values)
    except RecordError:
        raise
    except ValueError as error:
        raise RecordError(f"{where}: {error}") from error


@functools.cache
def _fields(kind: Any) -> tuple[dict[str, dataclasses.Field[Any]], dict[str, Any]]:
    """Fields and their types, looked up once a class: records come by the hundred thousand."""
    return {f.name: f for f in dataclasses.fields(kind)}, typing.get_type_hints(kind)


def _decode_scalar(kind: Any, value: object, where: str) -> object:
    if isinstance(value, int) and not -MAX_INT <= value < MAX_INT:
        raise RecordError(f"{where}: expected {kind.__name__}, got one beyond 64 bits")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, bool) and kind is not bool:
        raise RecordError(f"{where}: expected {kind.__name__}, got {value!r}")
    if not isinstance(value, kind):
        raise RecordError(f"{where}: expected {kind.__name__}, got {value!r}")
    return value
