"""Rules as data, and what a broken one says; `fsdp_core.config.RULES` has all of them."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration value that breaks a rule.

    key: dotted key of the value at fault, relative to the object that raised.
    expected: what the rule asks for, in words.
    legal: the legal values, if they can be listed.
    rule: name of the rule in the tables of rules; empty for the type or range of one value.
    """

    def __init__(
        self,
        key: str,
        *,
        expected: str,
        got: object,
        legal: tuple[object, ...] = (),
        rule: str = "",
    ) -> None:
        self.key, self.expected, self.got = key, expected, got
        self.legal, self.rule = legal, rule
        super().__init__(key, expected, got)

    def __str__(self) -> str:
        text = f"{self.key}: expected {self.expected}, got {self.got!r}"
        if self.legal:
            text += f"; legal values: {', '.join(str(value) for value in self.legal)}"
        return f"{text}; rule: {self.rule}" if self.rule else text

    def within(self, part: str) -> "ConfigError":
        """The same error with its key seen from the configuration that holds `part`."""
        key, expected, got = f"{part}.{self.key}", self.expected, self.got
        return ConfigError(key, expected=expected, got=got, legal=self.legal, rule=self.rule)


@dataclass(frozen=True)
class Rule(Generic[T]):
    """One rule about a `T`.

    name: unique among all rules; error messages end with it.
    message: one line that says what is asked, and why where that is not plain.
    breaks: whether a subject breaks it; it may raise the `ConfigError` itself.
    expected: what is asked for, in words; `{0.heads}` stands for the subject's `heads`.
    legal: the legal values, if they can be listed.
    alone: axes whose degree breaks the rule whatever the others are, if it breaks it in a layout
        that has no other; whoever lists layouts need not try these further.
    """

    name: str
    message: str
    breaks: Callable[[T], object]
    key: str = ""
    expected: str = ""
    legal: tuple[object, ...] = ()
    alone: tuple[str, ...] = ()


def broken(rules: Iterable[Rule[T]], subject: T) -> ConfigError | None:
    """The error of the first rule that `subject` breaks, or None."""
    try:
        obey(rules, subject)
    except ConfigError as error:
        return error
    return None


def obey(rules: Iterable[Rule[T]], subject: T) -> None:
    """Check all rules (`ConfigError`: of the first rule that `subject` breaks)."""
    for each in rules:
        try:
            if each.breaks(subject):
                refuse(subject, each.key, each.expected.format(subject), each.legal)
        except ConfigError as error:
            error.rule = each.name
            raise


def refuse(subject: object, key: str, expected: str, legal: tuple[object, ...] = ()) -> NoReturn:
    """Raise the `ConfigError` of what `subject` has at a dotted key."""
    got: Any = functools.reduce(getattr, key.split("."), subject)
    got = list(got) if isinstance(got, tuple) else got
    raise ConfigError(key, expected=expected, got=got, legal=legal)


def keep_defaults(subject: Any, keys: Iterable[str], why: str, part: str = "") -> None:
    """Refuse values of keys that would mean nothing, in `subject` or a part of it."""
    owner = getattr(subject, part) if part else subject
    defaults = {field.name: field.default for field in dataclasses.fields(owner)}
    for key in keys:
        if getattr(owner, key) != defaults[key]:
            shown = "none" if defaults[key] in ((), None) else str(defaults[key])
            shown = "eager" if key == "graph" else shown
            refuse(subject, f"{part}.{key}" if part else key, f"{shown.lower()}, {why}")


# --- types and ranges of single values --------------------------------------------------------

MOST = 2**31 - 1
"""Of whatever counts: larger ones no machine has, and listing their divisors takes for ever."""


def words(owner: object, **legal: tuple[str, ...]) -> None:
    """Each key has one of its legal words."""
    for key, those in legal.items():
        if getattr(owner, key) not in those:
            refuse(owner, key, "one of the legal values", those)


def integers(owner: object, least: int, *keys: str, most: int = MOST) -> None:
    """Integers, not bools, from `least` to `most`."""
    for key in keys:
        _integer(key, getattr(owner, key), least, most)


def _integer(key: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(key, expected=f"an integer >= {least}", got=value)
    if value > most:
        raise ConfigError(key, expected=f"an integer <= {most}", got=value)


def integer_tuples(owner: object, least: int, *keys: str) -> None:
    """Tuples of integers: a list would be equal to no tuple of the same ones."""
    for key in keys:
        value = getattr(owner, key)
        if not isinstance(value, tuple):
            raise ConfigError(key, expected="a tuple of integers", got=value)
        for each in value:
            _integer(key, each, least, MOST)


def name_tuples(owner: object, *keys: str) -> None:
    """Tuples of strings."""
    for key in keys:
        value = getattr(owner, key)
        if not isinstance(value, tuple) or not all(isinstance(name, str) for name in value):
            raise ConfigError(key, expected="a tuple of names", got=value)


def bools(owner: object, *keys: str) -> None:
    """Each is True or False."""
    for key in keys:
        if not isinstance(getattr(owner, key), bool):
            refuse(owner, key, "a bool", (True, False))


def numbers(owner: object, legal: str, *keys: str) -> None:
    """Finite numbers that are `>= 0`, `> 0` or `in [0, 1)`."""
    for key in keys:
        value = getattr(owner, key)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        good = good and math.isfinite(value) and value >= 0
        if not good or (legal == "> 0" and value == 0) or (legal == "in [0, 1)" and value >= 1):
            refuse(owner, key, f"a number {legal}")


def divisors(number: int) -> tuple[int, ...]:
    """The divisors of `number` >= 1, in ascending order."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    high = [number // d for d in reversed(low) if d * d != number]
    return (*low, *high)
