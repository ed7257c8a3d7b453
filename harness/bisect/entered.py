"""Collectives that ranks entered in a step, in order, as far as they were noted."""

import math
from collections import Counter
from collections.abc import Sequence

from harness.bisect.found import unit_of
from harness.checks.evidence import rank_table
from harness.records import GivenCall, RunResult, given_in


def kind_of(call: GivenCall) -> tuple[str, tuple[int, ...]]:
    """Operator and ranks of a collective."""
    return call.operator, call.group


def counted(calls: Sequence[GivenCall]) -> str:
    """How many there are of each kind, in words."""
    kinds = Counter(map(kind_of, calls)).items()
    each = (f"{n} {kind} of ranks {','.join(map(str, group))}" for (kind, group), n in kinds)
    return ", ".join(each) or "no reduction"


def entered(
    run: RunResult, rank: int, step: int, name: str, kinds: tuple[str, ...]
) -> list[GivenCall] | None:
    """The collectives of the innermost unit that holds a tensor or module; None without notes."""
    given = given_in(rank_table(run)[rank], step)
    labels = {call.label for call in given if call.label}
    around = [label for label in labels if f"{name}.".startswith(f"{label}.")]
    unit = max(around, key=len, default="root")
    if unit_of(unit) != unit_of(name):
        return []  # a unit of one rank, as experts may be, enters none
    calls = [c for c in given if c.label == unit and c.operator.startswith(kinds)]
    return calls if given else None


def first_other(reference: RunResult, candidate: RunResult, ranks: set[int], step: int) -> set[int]:
    """Of `ranks` those that entered another collective, or gave something else, before the rest."""

    def begins(rank: int) -> float:
        calls = (given_in(rank_table(run)[rank], step) for run in (reference, candidate))
        both = enumerate(zip(*calls, strict=False))
        return next((at for at, (ours, theirs) in both if ours != theirs), math.inf)

    places = {rank: begins(rank) for rank in ranks}
    first = min(places.values())
    return {rank for rank, at in places.items() if at == first < math.inf}
