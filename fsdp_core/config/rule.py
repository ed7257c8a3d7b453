"""What a broken rule says, and rules as data.

A rule has a name, one line for people, and a check that gives the error or None. The tables of
rules (`MODEL_RULES`, `PARALLEL_RULES`, `LAYOUT_RULES`, `GRAPH_RULES`) are in the modules of the
things that they are about; `fsdp_core.config.RULES` has them all.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration value that breaks a rule.

    Attributes:
        key: dotted key of the value at fault, relative to the object that raised.
        expected: what the rule asks for, in words.
        got: the value that was given.
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
        self.key = key
        self.expected = expected
        self.got = got
        self.legal = legal
        self.rule = rule
        super().__init__(key, expected, got)

    def __str__(self) -> str:
        text = f"{self.key}: expected {self.expected}, got {self.got!r}"
        if self.legal:
            text += f"; legal values: {', '.join(str(value) for value in self.legal)}"
        return f"{text}; rule: {self.rule}" if self.rule else text

    def within(self, part: str) -> "ConfigError":
        """The same error with its key seen from the configuration that holds `part`."""
        return ConfigError(
            f"{part}.{self.key}",
            expected=self.expected,
            got=self.got,
            legal=self.legal,
            rule=self.rule,
        )


@dataclass(frozen=True)
class Rule(Generic[T]):
    """One rule about a `T`.

    Attributes:
        name: unique among all rules; error messages end with it.
        message: one line that says what is asked, and why where that is not plain.
        check: the error that `T` deserves, or None.
        alone: axes whose degree breaks the rule whatever the others are, if it breaks it in a
            layout that has no other; whoever lists layouts need not try these further.
    """

    name: str
    message: str
    check: Callable[[T], ConfigError | None]
    alone: tuple[str, ...] = ()


def broken(rules: Iterable[Rule[T]], subject: T) -> ConfigError | None:
    """The error of the first rule that `subject` breaks, or None."""
    for rule in rules:
        error = rule.check(subject)
        if error is not None:
            error.rule = rule.name
            return error
    return None


def obey(rules: Iterable[Rule[T]], subject: T) -> None:
    """Check all rules.

    Raises:
        ConfigError: of the first rule that `subject` breaks.
    """
    error = broken(rules, subject)
    if error is not None:
        raise error


# --- types and ranges of single values --------------------------------------------------------


def one_of(key: str, value: object, legal: tuple[str, ...]) -> None:
    """`value` is one of the words in `legal`."""
    if value not in legal:
        raise ConfigError(key, expected="one of the legal values", got=value, legal=legal)


MOST = 2**31 - 1
"""Of whatever counts: larger ones no machine has, and listing their divisors takes for ever."""


def at_least(key: str, value: object, minimum: int, most: float = MOST) -> None:
    """`value` is an integer, not a bool, not below `minimum` and not above `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(key, expected=f"an integer >= {minimum}", got=value)
    if value > most:
        raise ConfigError(key, expected=f"an integer <= {most}", got=value)


def are_names(key: str, value: object) -> None:
    """`value` is a tuple of strings: a list would be equal to no tuple of the same names."""
    if not isinstance(value, tuple) or not all(isinstance(name, str) for name in value):
        raise ConfigError(key, expected="a tuple of names", got=value)


def is_bool(key: str, value: object) -> None:
    """`value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(key, expected="a bool", got=value, legal=(True, False))


def not_negative(key: str, value: object) -> None:
    """`value` is a finite number >= 0."""
    if not _is_number(value) or not value >= 0:  # type: ignore[operator]
        raise ConfigError(key, expected="a number >= 0", got=value)


def positive(key: str, value: object) -> None:
    """`value` is a finite number > 0."""
    if not _is_number(value) or not value > 0:  # type: ignore[operator]
        raise ConfigError(key, expected="a number > 0", got=value)


def fraction(key: str, value: object, *, below: float) -> None:
    """`value` is a number in [0, below); NaN is not."""
    if not _is_number(value) or not 0.0 <= value < below:  # type: ignore[operator]
        raise ConfigError(key, expected=f"a number in [0, {below:g})", got=value)


def _is_number(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)  # type: ignore[arg-type]


def divisors(number: int) -> tuple[int, ...]:
    """The divisors of `number` >= 1, in ascending order."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    high = [number // d for d in reversed(low) if d * d != number]
    return (*low, *high)
