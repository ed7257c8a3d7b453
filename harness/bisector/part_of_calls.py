"""The first call whose input, output or gradient differs, and whose work that was.

first row in program order, all before it equal
  input of M      whoever handed it to M: the module around M, or the data       input, forward
  output of M     M's own work, on its weights                                   forward
  gradient of M   backward of whoever consumed what M returned                   backward
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from fsdp_core.config.scopes import BEGINS_AT
from harness.bisector.flow import common, consumers, parent_of, returned_by, unit_of
from harness.bisector.found import Location
from harness.bisector.legs import INPUT, OUTPUT, Legs, Row
from harness.checks.evidence import show_ranks
from harness.faults.fault import Phase

_FROM_LOSS = "it is the first gradient of its microbatch: it comes from the loss"


def calls_part(legs: Legs, at_step: Location) -> Location | None:
    """Where calls first differ; None if they do not, or nothing was looked into."""
    assert at_step.step is not None
    rows = legs.rows(at_step.step)
    differing = [row for row in rows if row.differs]
    if not differing:
        return None
    losses = [name for name, *_ in legs.floats(at_step.step) if name != "grad_norm"]
    if differing[0].is_backward and losses:
        return None  # the loss was computed before any gradient
    # A call that one run never made is no result: what came of that is the first that differs.
    first = next((row for row in differing if _is_whole(row)), differing[0])
    if first.is_backward and not differing[0].is_backward:
        first = differing[0]
    same = [row for row in rows if (row.tap, row.number) == (first.tap, first.number)]
    ranks = tuple(sorted(row.rank for row in same if row.differs))
    # A module that is called more than once a microbatch has its rows numbered by calls.
    tensor = first.tap if first.microbatch == first.number else first.name
    found = replace(
        at_step, microbatch=first.microbatch, tensor=tensor, quantity=f"taps.{first.kind}",
        rank=first.rank, ranks=ranks,
        evidence=(*at_step.evidence, _first_told(first, ranks)),
    )  # fmt: skip
    if first is not differing[0]:
        found = replace(found, evidence=(*found.evidence, _missing_told(differing[0])))
    if first.is_folded:
        why = f"microbatch: {first.name} stands for several calls of the step"
        found = replace(found, unknown=(*found.unknown, why))
    if not _is_whole(first):
        phase: Phase = "backward" if first.is_backward else "forward"
        found = replace(found, phase=phase, module=first.module)
    elif first.kind == INPUT:
        found = _input(found, first, rows, legs)
    elif first.kind == OUTPUT:
        found = _output(found, first, rows, legs)
    else:
        found = _gradient(found, first, rows)
    found = _spread(_across(found, len(same), legs), first, rows)
    return _at_capture(found, first, rows, legs)


def _at_capture(found: Location, first: Row, rows: Sequence[Row], legs: Legs) -> Location:
    """In the step that captures, all or nothing of which differs: it was not run, or run twice."""
    config = legs.candidate.spec.config
    if not config.get("graph") or found.step != config.get("graph_warmup_steps"):
        return found
    told = "graphs are captured in this step, before its passes, which replay them"
    begins = first.module == rows[0].module and not first.is_backward
    if begins and len(found.ranks) == legs.reference.spec.world_size:
        told += ", which differs from its beginning on: it was not run, or on what a capture left"
        return replace(found, phase="capture", evidence=(*found.evidence, told))
    return replace(found, evidence=(*found.evidence, told))


def _first_told(first: Row, ranks: Sequence[int]) -> str:
    what = f"{first.kind} of {first.module}"
    if first.is_backward:
        what = f"gradient of the output of {first.module}"
    if not _is_whole(first):
        return _missing_told(first)
    return (
        f"the first thing in program order that differs is the {what}, call {first.number}, on "
        f"{show_ranks(set(ranks))}"
    )


def _is_whole(row: Row) -> bool:
    """Whether both runs made the call."""
    return bool(row.reference and row.candidate)


def _missing_told(row: Row) -> str:
    run = "candidate" if not row.candidate else "reference"
    return (
        f"the {run} did not call {row.module}, call {row.number}, on rank {row.rank}: something "
        "else ran in its place"
    )


def _input(found: Location, first: Row, rows: Sequence[Row], legs: Legs) -> Location:
    """Nobody's output differs yet: it was made between modules, or it is data."""
    known = {row.module for row in rows}
    before = _of_same_microbatch(first, rows)
    around = parent_of(first.module, known)
    makers = [r.module for r in before if r.kind == OUTPUT and r.reference == first.reference]
    begins = next((r for r in before if r.stage == first.stage), None) is first
    if begins and not makers and first.stage == 0:
        what = "tokens or positions" if legs.has_layouts else "the program's own data"
        told = f"it is what the microbatch begins with: {what}"
        return replace(found, phase="input", module=first.module, evidence=(*found.evidence, told))
    if begins and first.stage > 0:
        return replace(
            found, phase="forward", module=first.module, near="in",
            collective=f"transfer of activations to stage {first.stage} of the pipeline",
            evidence=(*found.evidence, "what the stage before it returned is equal"),
        )  # fmt: skip
    given = [r.module for r in before if r.kind == INPUT and r.reference == first.reference]
    if around in given:
        told = f"{around} was given it as it should be and handed on something else: its own work"
        if _is_replayed(around, legs, found.step):
            told += ", or the copy of what it was given into memory that its graph reads"
        return replace(found, phase="forward", module=around, evidence=(*found.evidence, told))
    if makers:
        told = f"{makers[-1]} returned it as the reference did: it changed on its way"
        return replace(
            found, phase="forward", module=first.module, evidence=(*found.evidence, told)
        )
    if not around:
        told = "no module made it: it is given to the model"
        return replace(found, phase="input", module=first.module, evidence=(*found.evidence, told))
    told = f"{around} made it from parts that are equal: it is {around}'s own work"
    return replace(found, phase="forward", module=around, evidence=(*found.evidence, told))


def _is_replayed(module: str, legs: Legs, step: int | None) -> bool:
    """Whether a graph of the candidate begins with what the module is given."""
    config = legs.candidate.spec.config
    layer, _, branch = module.removeprefix("layers.").partition(".")
    scopes = {scope for scope, part in BEGINS_AT.items() if part == branch}
    first, last = config.get("graph_layers") or (0, math.inf)
    return (
        bool(scopes & set(config.get("graph", ())))
        and layer.isdecimal()
        and first <= int(layer) <= last
        and step is not None
        and step >= config.get("graph_warmup_steps", 0)
    )


def _output(found: Location, first: Row, rows: Sequence[Row], legs: Legs) -> Location:
    """What went in is equal, so is every part of it that was looked into."""
    assert found.step is not None
    told = [f"what went into {first.module} is equal"]
    weights = _weights_of(first.module, legs)
    if weights and found.step:
        told.append(
            f"its main weights were equal after step {found.step - 1}: it read a copy of them that "
            "was not (stale, overwritten, of another unit), or computed otherwise"
        )
    drawn = any(t.differs for t in legs.tensors(found.step, "rng"))
    if drawn and not weights:
        told.append("the random state differs at the end of the step, too: it drew other numbers")
    return replace(found, phase="forward", module=first.module, evidence=(*found.evidence, *told))


def _gradient(found: Location, first: Row, rows: Sequence[Row]) -> Location:
    """It was computed by the backward of whoever consumed the output that it belongs to."""
    known = {row.module for row in rows}
    users = consumers(first, rows)
    around = parent_of(returned_by(first, rows), known)
    module = common(users, known) if users else around
    same = (r for r in _of_same_microbatch(first, rows) if r.is_backward)
    begins = next((r for r in same if r.stage == first.stage), None) is first
    told = [
        "every loss, and every output of the step, is equal",
        f"it is what the backward of {module} gave" if module else "the loss gave it",
    ]
    if users:
        told.append(f"{', '.join(users[:3])} consumed what {first.module} returned")
    last = max((row.stage for row in rows), default=0)
    if begins and first.stage < last:
        return replace(
            found, phase="backward", module=returned_by(first, rows), near="in",
            collective=f"transfer of gradients to stage {first.stage} of the pipeline",
            evidence=(*found.evidence, "nothing that later stages computed differs"),
        )  # fmt: skip
    if begins:
        told.append(_FROM_LOSS)
        module = first.module
    return replace(
        found, phase="backward", module=module, from_loss=begins,
        evidence=(*found.evidence, *told),
    )  # fmt: skip


def _of_same_microbatch(first: Row, rows: Sequence[Row]) -> list[Row]:
    """Rows of the rank and the microbatch of a row; of one that stands for several calls, none."""
    if first.is_folded:
        return []
    return [r for r in rows if (r.rank, r.microbatch) == (first.rank, first.microbatch)]


def _weights_of(module: str, legs: Legs) -> list[str]:
    names = {name for start in legs.starts.values() for name in start.tensors.get("weights", ())}
    return sorted(name for name in names if name.rpartition(".")[0] == module)


def _across(found: Location, num_same: int, legs: Legs) -> Location:
    """On which side of what ranks share the origin lies."""
    weights = _weights_of(found.module, legs)
    world = legs.reference.spec.world_size
    if world == 1 or found.phase not in ("forward", "backward") or found.near or not weights:
        return found
    if not legs.has_layouts:
        return found  # nobody knows whether ranks gather weights
    if found.from_loss:
        return found  # no weight is read on the way
    gather = f"all-gather of the weights of {unit_of(weights[0])}"
    if len(found.ranks) == 1 and num_same > 1:
        told = f"the other ranks have it right: rank {found.rank}'s own copy or work is wrong"
        return replace(
            found, near="after", collective=gather, operation="all-gather",
            evidence=(*found.evidence, told),
        )  # fmt: skip
    if len(found.ranks) == num_same == world:
        # Whether it came by the gather is told by what ranks gave to it: see `givers`.
        told = "it is wrong on every rank alike: in what they share or compute, or before it"
        return replace(found, operation="all-gather", evidence=(*found.evidence, told))
    return found


def _spread(found: Location, first: Row, rows: Sequence[Row]) -> Location:
    """Where the other ranks go wrong, later in the step: that is where it came to them."""
    later: dict[int, Row] = {}
    for row in rows:
        if row.differs and row.rank not in found.ranks:
            later.setdefault(row.rank, row)
    told = tuple(
        f"it comes to rank {rank} with {row.name}" for rank, row in sorted(later.items())[:2]
    )
    return replace(found, evidence=(*found.evidence, *told))
