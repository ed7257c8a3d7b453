"""Strict JSON round trip of frozen dataclasses: what does not fit its type is an error."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec

MAX_INT = 1 << 63


class RecordError(ValueError):
    """A record that does not decode; it is reported, never trusted."""


class Json:
    """Mixin: strict JSON round trip of a frozen dataclass, by its field types."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON-ready values, in containers of their own."""
        plain: dict[str, Any] = msgspec.to_builtins(self, enc_hook=_base)
        return plain

    @classmethod
    def from_json(cls, plain: object) -> Self:
        """Rebuild from `to_json`'s output.

        Raises:
            RecordError: not a mapping, unknown or missing key, or a value of the wrong type; with
                the path of the key.
        """
        if isinstance(plain, dict) and (unknown := plain.keys() - cls.__dataclass_fields__.keys()):
            raise RecordError(f"{cls.__name__}: unknown keys {sorted(unknown)}")
        try:
            return msgspec.convert(plain, cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RecordError(f"{cls.__name__}: {error}") from error


def dumps(value: Json | Mapping[str, Any]) -> str:
    """One line of JSON with sorted keys and no NaN."""
    plain = value.to_json() if isinstance(value, Json) else value
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


def strict_loads(data: bytes | str) -> Any:
    """The value of a text of JSON.

    Not by msgspec, which refuses half of a surrogate pair: what programs print may hold some.

    Raises:
        ValueError: not UTF-8, not JSON, no number of 64 bits, a key twice, or nested too deeply.
    """
    try:
        text = data if isinstance(data, str) else data.decode()
        return json.loads(text, parse_constant=_refuse, parse_int=_bounded, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _base(value: object) -> object:
    """What a value of another library is: the version of torch is a text, too."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} {value!r:.80} is not JSON")


def _bounded(text: str) -> int:
    if not -MAX_INT <= (value := int(text)) < MAX_INT:
        raise ValueError(f"{text:.40} has more than 64 bits")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("a key twice in one object")
    return found


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is not JSON")
