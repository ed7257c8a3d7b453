"""Gradients that differ though every call is equal: a weight's own gradient, or its reduction.

A gradient is digested after it is reduced: each rank holds its rows of the sum over the ranks. So
which rank added something wrong cannot be seen; that one tensor or a whole unit is wrong can, and
whether every rank that holds rows of it has wrong ones.

    one module's tensors, of a unit that has more       backward of the module   before
    a whole unit, or the same tensor in many layers     reduce                   in
    one rank's rows alone, where others hold some too   reduce                   after
"""

from collections.abc import Sequence
from dataclasses import replace

from harness.bisector.flow import module_of, unit_of
from harness.bisector.found import Location
from harness.bisector.legs import Legs, Row, Tensor
from harness.bisector.words import differ, listed, ranks_of
from harness.checks.evidence import show_ranks

REDUCTION = "reduce-scatter of gradients"
ROOT = unit_of("")


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
