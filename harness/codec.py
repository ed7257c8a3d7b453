"""Strict JSON round trip of frozen dataclasses: what does not fit its type is an error."""

import dataclasses
import json
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
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

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
    (option,) = (o for o in options if o is not type(None))
    return _decode(option, value, where)


def _decode_dataclass(kind: Any, value: object, where: str) -> object:
    if not isinstance(value, Mapping):
        raise RecordError(f"{where}: expected a mapping, got {value!r}")
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
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


def _decode_scalar(kind: Any, value: object, where: str) -> object:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, bool) and kind is not bool:
        raise RecordError(f"{where}: expected {kind.__name__}, got {value!r}")
    if not isinstance(value, kind):
        raise RecordError(f"{where}: expected {kind.__name__}, got {value!r}")
    return value
