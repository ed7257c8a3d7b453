"""Which of a matrix's cases are run: `-k`, and `select: pairwise`.

The `-k` filter is an expression over case ids and labels.

    expression := term ("or" term)*       term := factor ("and" factor)*
    factor     := "not" factor | "(" expression ")" | WORD

A WORD selects the cases whose id contains it, or one of whose labels does, written `axis=value`;
letter case does not matter. As in pytest, `dp2` also finds `dp24`.

`pairwise` leaves a small part of a matrix that still has every pair of values.

Pairs are those of the cases that there are, so whatever exclude and the rules leave out is never
asked for, and every pair that some case has is covered by a chosen one. With one axis, every value.

The choice is greedy: the case with the most pairs that are not covered yet, the first in the file's
order among equals (V. Chvatal, "A greedy heuristic for the set-covering problem", Mathematics of
Operations Research 4(3), 1979; for pairs of test parameters: D. Cohen et al., "The AETG system",
IEEE TSE 23(7), 1997). What a case would add only shrinks, so the best by its last known count need
be counted again only (M. Minoux, "Accelerated greedy algorithms", 1978). It draws nothing at
random: the same cases give the same choice.
"""

import heapq
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from harness.errors import UsageError, shown
from harness.records import CaseSpec

Predicate = Callable[[str], bool]
Holds = Callable[[Predicate], bool]

MAX_EXPRESSION_CHARS = 2000
MAX_DEPTH = 50
_TOKEN = re.compile(r"\s*([()]|[^\s()]+)")
_OPERATORS = ("and", "or", "not", "(", ")")
_SEPARATOR = "\n"
"""Between the texts that a case is known by; no word can hold it."""


def select(cases: Iterable[CaseSpec], expression: str | None) -> tuple[CaseSpec, ...]:
    """The cases that the expression selects, in their order; all of them for None.

    Raises:
        UsageError: the expression cannot be read.
    """
    if expression is None:
        return tuple(cases)
    matches = compile_expression(expression)
    return tuple(case for case in cases if matches(_known_as(case)))


def _known_as(case: CaseSpec) -> str:
    labels = (f"{axis}={value}" for axis, value in case.labels.items())
    return _SEPARATOR.join((case.id, *labels)).lower()


def compile_expression(expression: str) -> Predicate:
    """A function from a case's lower-case texts to yes or no.

    Raises:
        UsageError: the expression cannot be read.
    """
    holds = read_expression(expression).holds
    return lambda text: holds(lambda word: word.lower() in text)


@dataclass(frozen=True)
class Expression:
    """An expression that was read.

    Attributes:
        words: in it, each once.
        holds: from a function that says which words are true to whether the expression is.
    """

    words: tuple[str, ...]
    holds: Holds


def read_expression(expression: str) -> Expression:
    """Read an expression, whatever its words stand for.

    Raises:
        UsageError: it cannot be read.
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise _bad(expression, f"at most {MAX_EXPRESSION_CHARS} characters", shown(expression))
    parser = _Parser(expression)
    holds = parser.expression()
    if parser.token is not None:
        raise _bad(expression, "and, or, or the end", shown(parser.token))
    return Expression(tuple(parser.words), holds)


def _bad(expression: str, expected: str, got: str) -> UsageError:
    return UsageError(f"-k {shown(expression)}: expected {expected}, got {got}")


class _Parser:
    """Recursive descent; `token` is the next one, None at the end."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = iter(_TOKEN.findall(text))
        self.token: str | None = next(self.tokens, None)
        self.depth = 0
        self.words: dict[str, None] = {}

    def _next(self) -> str | None:
        taken, self.token = self.token, next(self.tokens, None)
        return taken

    def expression(self) -> Holds:
        terms = [self.term()]
        while self.token == "or":
            self._next()
            terms.append(self.term())
        return terms[0] if len(terms) == 1 else lambda is_true: any(t(is_true) for t in terms)

    def term(self) -> Holds:
        factors = [self.factor()]
        while self.token == "and":
            self._next()
            factors.append(self.factor())
        return factors[0] if len(factors) == 1 else lambda is_true: all(f(is_true) for f in factors)

    def factor(self) -> Holds:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _bad(self.text, f"at most {MAX_DEPTH} levels", "deeper nesting")
        holds = self._factor()
        self.depth -= 1
        return holds

    def _factor(self) -> Holds:
        token = self._next()
        if token == "not":
            inner = self.factor()
            return lambda is_true: not inner(is_true)
        if token == "(":
            inner = self.expression()
            if self._next() != ")":
                raise _bad(self.text, "a closing parenthesis", "the end")
            return inner
        if token is None or token in _OPERATORS:
            raise _bad(self.text, "a word, not or (", shown(token) if token else "the end")
        self.words[token] = None
        return lambda is_true: is_true(token)


Element = tuple[int, ...]
"""A value of an axis, or two values of two axes, by their numbers."""


class Labelled(Protocol):
    """What is asked of a case: its name, and its value on each axis."""

    @property
    def id(self) -> str:
        """Of its own."""
        ...

    @property
    def labels(self) -> Mapping[str, str]:
        """Values by axis."""
        ...


Case = TypeVar("Case", bound=Labelled)


def pairwise(cases: Sequence[Case], *, keep: Collection[str] = ()) -> tuple[Case, ...]:
    """Cases that cover every pair of values that any of `cases` has, in their order.

    Args:
        cases: all that there are.
        keep: ids of cases that are chosen in any case.
    """
    covers = _elements(cases)
    chosen = {place for place, case in enumerate(cases) if case.id in keep}
    covered = {element for place in chosen for element in covers[place]}
    left = {element for held in covers for element in held} - covered
    queue = [(-len(held), place) for place, held in enumerate(covers) if place not in chosen]
    heapq.heapify(queue)
    while left:
        _, place = heapq.heappop(queue)
        gain = sum(element in left for element in covers[place])
        if queue and (-gain, place) > queue[0]:
            if gain:
                heapq.heappush(queue, (-gain, place))
            continue
        chosen.add(place)
        left.difference_update(covers[place])
    return tuple(cases[place] for place in sorted(chosen))


def num_pairs(cases: Sequence[Labelled]) -> int:
    """How many pairs of values the cases have; of one axis, values."""
    return len({element for held in _elements(cases) for element in held})


def _elements(cases: Sequence[Labelled]) -> list[list[Element]]:
    """What each case covers: its pairs, or its values where it has but one."""
    labels = [tuple(case.labels.items()) for case in cases]
    # Values may read alike. Cases that do are told apart by their ids, and so all stay.
    alike = Counter(labels)
    numbers: dict[tuple[str, str], int] = {}
    found: list[list[Element]] = []
    for case, held in zip(cases, labels, strict=True):
        named = held if alike[held] == 1 else (*held, ("", case.id))
        values = sorted(numbers.setdefault(value, len(numbers)) for value in named)
        pairs: list[Element] = list(itertools.combinations(values, 2))
        found.append(pairs or [(value,) for value in values])
    return found
