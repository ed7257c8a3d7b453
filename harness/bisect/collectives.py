"""What ranks bring together: gradients that differ though every call is equal, and who gave what.

A gradient is digested after it is reduced: each rank holds its rows of the sum over the ranks. So
which rank added something wrong cannot be seen; that one tensor or a whole unit is wrong can, and
whether every rank that holds rows of it has wrong ones.

    one module's tensors, of a unit that has more       backward of the module   before
    a whole unit, or the same tensor in many layers     reduce                   in
    one rank's rows alone, where others hold some too   reduce                   after

Which rank brought it in is told by what each of them gave to the collective (`with_givers`), known
of runs that look into modules, on the CPU (`harness.worker.collectives`):

    some ranks gave something else     they are the origin: before the collective
    every rank gave what it should     in the collective, or after it
    every rank gave something else     before it, on all of them
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.bisect.aligned import Legs, Row, Tensor, differ, listed, module_of, ranks_of, unit_of
from harness.bisect.found import Location
from harness.checks.evidence import rank_table, show_ranks
from harness.faults.fault import Phase
from harness.given import GivenCall, given_in

ROOT = "root"
REDUCTION = "reduce-scatter of gradients"


def gradients_part(legs: Legs, at_step: Location) -> Location | None:
    """Where gradients first differ, in the order of the backward pass; None if they are equal."""
    assert at_step.step is not None
    tensors = legs.tensors(at_step.step, "grads")
    bad = _in_backward_order([t for t in tensors if t.differs], legs.rows(at_step.step))
    if not bad:
        return None
    first = bad[0]
    names = list(dict.fromkeys(t.name for t in bad))
    found = replace(
        at_step, module=module_of(first.name), tensor=first.name, quantity="grads",
        rank=first.rank, ranks=ranks_of(bad, first.name),
        evidence=(*at_step.evidence, _equal_before(legs), _which(names, bad)),
    )  # fmt: skip
    if not legs.has_taps:
        why = "phase: no module was looked into, so the gradients may have come wrong to the weight"
        found = replace(found, unknown=(*found.unknown, why))
    return _side(found, tensors, names, legs)


def _side(found: Location, tensors: Sequence[Tensor], names: list[str], legs: Legs) -> Location:
    """Decide between the weight's own gradient and what brings gradients together."""
    world = legs.reference.spec.world_size
    if not legs.has_layouts:
        told = "they are recorded as the optimizer receives them, after any reduction over ranks"
        return replace(
            found, phase="backward", evidence=(*found.evidence, told), sum_hides_rank=world > 1
        )
    held = {(t.name, t.rank): t.differs for t in tensors if t.name in names}
    spared = sorted({rank for (_, rank), bad in held.items() if not bad})
    wrong = sorted({rank for (_, rank), bad in held.items() if bad})
    alone = [rank for rank in wrong if rank not in spared]
    modules = {module_of(name) for name in names}
    if spared and len(alone) == 1 and len(wrong) == 1 and len(names) > 1:
        told = (
            f"{show_ranks(set(wrong))} alone has wrong rows, others hold rows of the same tensors "
            "and have right ones: it is the rank's own part of the reduction, or what it did after"
        )
        return _reduce(found, "after", told)
    if len(modules) == 1 and not _is_whole_unit(names, tensors):
        told = "the rest of its unit went through the same reduction and is equal"
        if world == 1:
            told = "there is one rank: nothing is reduced"
        return replace(
            found, phase="backward", near="before" if world > 1 else "",
            collective=REDUCTION if world > 1 else "", evidence=(*found.evidence, told),
            operation="reduce-scatter" if world > 1 else "", sum_hides_rank=world > 1,
        )  # fmt: skip
    if world == 1:
        return replace(found, phase="backward")
    units = sorted({unit_of(name) for name in names})
    told = (
        f"tensors of {len(modules)} modules differ, in {listed(units)}: what brings them together"
    )
    if _is_whole_unit(names, tensors):
        told = f"every tensor of {listed(units)} differs: they travel together"
        # The first of them says nothing: which rank has its rows is how the unit is cut.
        one = units[0].partition(" ")[0] if len(units) == 1 else ROOT
        module = "" if one == ROOT else one
        found = replace(found, module=module, rank=wrong[0], ranks=tuple(wrong))
    return replace(_reduce(found, "in", told), sum_hides_rank=True)


def _reduce(found: Location, near: str, told: str) -> Location:
    assert near in ("in", "after")
    return replace(
        found, phase="reduce", near="in" if near == "in" else "after", collective=REDUCTION,
        operation="reduce-scatter", evidence=(*found.evidence, told),
    )  # fmt: skip


def _is_whole_unit(names: list[str], tensors: Sequence[Tensor]) -> bool:
    """Whether all that travels with the first of them differs, more than one tensor."""
    unit = unit_of(names[0])
    members = {t.name for t in tensors if unit_of(t.name) == unit}
    return len(members) > 1 and members <= set(names)


def _equal_before(legs: Legs) -> str:
    if not legs.has_taps:
        return "the losses are equal on every rank"
    return "what went into every module, came out and came back as gradient is equal on every rank"


def _which(names: list[str], bad: Sequence[Tensor]) -> str:
    where = show_ranks({t.rank for t in bad})
    noun = "gradient" if len(names) == 1 else "gradients"
    return f"the {noun} of {listed(names)} {differ(len(names))}, on {where}"


def _in_backward_order(bad: list[Tensor], rows: Sequence[Row]) -> list[Tensor]:
    """The last module of the model first: the backward pass comes to it first."""
    places: dict[str, int] = {}
    for place, row in enumerate(rows):
        if row.is_backward:
            places.setdefault(row.module, place)
    last = len(rows)

    def place_of(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
        number = tuple(-int(p) for p in tensor.name.split(".") if p.isdigit())
        return (places.get(module_of(tensor.name), last), number)

    return sorted(bad, key=place_of)


REDUCTIONS = ("reduce_scatter", "allreduce", "all_reduce")
GATHERS = ("allgather", "all_gather")


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
