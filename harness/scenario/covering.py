"""A small part of a matrix that still has every pair of values: `select: pairwise`.

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
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, TypeVar

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
