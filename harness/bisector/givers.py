"""Which rank brought what is wrong into a collective: told by what each of them gave to it.

    gradients that differ once they are summed    reductions of their unit
    an output that differs on every rank          gathers of the weights that it was computed with

    some ranks gave something else     they are the origin: before the collective
    every rank gave what it should     in the collective, or after it
    every rank gave something else     before it, on all of them

What ranks gave is known of runs that look into modules, on the CPU (`harness.worker.given`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.bisector.found import Location
from harness.bisector.legs import Legs
from harness.checks.evidence import rank_table, show_ranks
from harness.faults.fault import Phase
from harness.given import GivenCall, given_in

REDUCTIONS = ("reduce_scatter", "allreduce", "all_reduce")
GATHERS = ("allgather", "all_gather")
ROOT = "root"


@dataclass(frozen=True)
class _Rank:
    """The collectives of one unit that a rank entered, in both legs."""

    rank: int
    ours: tuple[GivenCall, ...]
    theirs: tuple[GivenCall, ...]

    @property
    def is_alike(self) -> bool:
        """Whether both legs entered the same ones."""
        return [*map(_kind, self.ours)] == [*map(_kind, self.theirs)]

    @property
    def differs(self) -> bool:
        """Of the first collective only: what later ones are given is made of what came out."""
        first = _kind(self.ours[0])
        pairs = zip(self.ours, self.theirs, strict=True)
        return any(a.digest != b.digest for a, b in pairs if _kind(a) == first)


def with_givers(found: Location, legs: Legs) -> Location:
    """The place, with the ranks at which what is wrong entered its collective."""
    found = _looked_into(found, legs)
    if not found.sum_hides_rank:
        return found
    why = "rank: the sum over ranks does not show who added what is wrong"
    return replace(found, unknown=(*found.unknown, why))


def _looked_into(found: Location, legs: Legs) -> Location:
    is_sum = found.quantity == "grads" and found.near in ("before", "in")
    is_gather = not found.near and found.operation == "all-gather"
    if found.step is None or not (is_sum or is_gather):
        return found
    name = found.tensor if is_sum else found.module
    kinds = REDUCTIONS if is_sum else GATHERS
    seen = [_seen(legs, rank, found.step, name, kinds) for rank in legs.ranks(found.step)]
    known = [each for each in seen if each is not None and each.ours]
    if len(known) < legs.reference.spec.world_size:
        return found
    if all(each.is_alike for each in known):
        unit = _unit(name, known[0].ours)
        return _decided(found, [each.rank for each in known if each.differs], len(known), unit)
    return _with_missing(found, known) if is_sum else found


def _seen(legs: Legs, rank: int, step: int, name: str, kinds: Sequence[str]) -> _Rank | None:
    """None where a leg has noted nothing at all: that is no collective that it left out."""
    sides = []
    for run in (legs.reference, legs.candidate):
        given = given_in(rank_table(run)[rank], step)
        if not given:
            return None
        unit = _unit(name, given)
        sides.append(
            tuple(
                call
                for call in given
                if call.label == unit and call.operator.startswith(tuple(kinds))
            )
        )
    return _Rank(rank, *sides)


def _unit(name: str, given: Sequence[GivenCall]) -> str:
    """The innermost unit that holds a tensor or a module, of those that entered something."""
    labels = {call.label for call in given if call.label}
    around = [label for label in labels if name == label or name.startswith(f"{label}.")]
    return max(around, key=len, default=ROOT)


def _kind(call: GivenCall) -> tuple[str, tuple[int, ...]]:
    return call.operator, call.group


def _decided(found: Location, wrong: Sequence[int], world: int, unit: str) -> Location:
    what = "gradients" if found.quantity == "grads" else "weights"
    into = f"into the {found.operation or 'collective'} of {unit}"
    found = replace(found, sum_hides_rank=False)
    if not wrong and found.operation == "all-gather":
        told = f"what every rank gave {into} is equal: the fault is in it, or in what follows"
        return replace(found, evidence=(*found.evidence, told))
    if found.operation == "all-gather":
        found = replace(found, collective=f"all-gather of the weights of {unit}")
    if not wrong:
        told = f"what every rank gave {into} is equal: it went wrong in it, or after it"
        if found.phase == "backward" and found.quantity == "grads":
            found = replace(found, phase="reduce", near="after")
        return replace(found, evidence=(*found.evidence, told))
    if len(wrong) == world:
        told = f"every rank gave other {what} {into}"
        phase: Phase | None = "backward" if found.quantity == "grads" else found.phase
        return replace(found, phase=phase, near="before", evidence=(*found.evidence, told))
    told = f"{show_ranks(set(wrong))} alone gave other {what} {into}: it entered there"
    return replace(
        found, near="before", rank=wrong[0], ranks=tuple(wrong),
        evidence=(*found.evidence, told),
    )  # fmt: skip


def _with_missing(found: Location, known: Sequence[_Rank]) -> Location:
    """The legs did not reduce alike: that is said, and nothing of what was given."""
    odd = next(each for each in known if not each.is_alike)
    told = (
        f"rank {odd.rank} entered {_counted(odd.theirs)} for {odd.ours[0].label} where the "
        f"reference entered {_counted(odd.ours)}"
    )
    return replace(found, evidence=(*found.evidence, told))


def _counted(calls: Sequence[GivenCall]) -> str:
    kinds = dict.fromkeys(map(_kind, calls))
    each = (
        f"{sum(_kind(call) == (operator, group) for call in calls)} {operator} of ranks "
        f"{','.join(map(str, group))}"
        for operator, group in kinds
    )
    return ", ".join(each) or "no reduction"
