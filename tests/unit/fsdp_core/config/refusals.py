"""What configurations refuse, as data: owner, values, key, expected, got, legal values."""

from collections.abc import Callable
from typing import Any

import pytest

from fsdp_core.config import ConfigError

NAN, INFINITY = float("nan"), float("inf")
Refusal = tuple[Callable[..., Any], dict[str, Any], str, str, Any, tuple[object, ...]]


def integers(owner: Callable[..., Any], key: str, minimum: int) -> list[Refusal]:
    """An integer field refuses what is below its minimum, a bool, a float and a word."""
    expected = f"an integer >= {minimum}"
    bad = [minimum - 1, -7, True, float(minimum), str(minimum), None]
    return [(owner, {key: value}, key, expected, value, ()) for value in bad]


def numbers(owner: Callable[..., Any], key: str, expected: str, bad: list[Any]) -> list[Refusal]:
    """A number field refuses each of `bad`."""
    return [(owner, {key: value}, key, expected, value, ()) for value in bad]


def words(owner: Callable[..., Any], key: str, legal: tuple[str, ...]) -> list[Refusal]:
    """A field of listed words refuses others, and lists the legal ones."""
    return [
        (owner, {key: value}, key, "one of the legal values", value, legal)
        for value in ("nonsense", "", None, legal[0].upper())
    ]


def bools(owner: Callable[..., Any], key: str) -> list[Refusal]:
    """A yes or no refuses what only looks like one."""
    return [(owner, {key: value}, key, "a bool", value, (True, False)) for value in (1, "no", None)]


def name_of(refusal: Refusal) -> str:
    """Id of a test."""
    return f"{refusal[0].__name__}-{refusal[2]}-{refusal[4]!r}"


def check(refusal: Refusal) -> None:
    """The owner refuses the values with exactly this error."""
    owner, values, key, expected, got, legal = refusal
    with pytest.raises(ConfigError) as caught:
        owner(**values)
    error = caught.value
    assert (error.key, error.expected, error.legal) == (key, expected, legal)
    assert repr(error.got) == repr(got)
    assert str(error).startswith(f"{key}: expected {expected}, got {got!r}")
    for value in legal:
        assert str(value) in str(error)
    assert "\n" not in str(error)
