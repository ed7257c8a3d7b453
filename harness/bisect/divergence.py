"""Where two runs part: the step, its phase, the module, the tensor, the ranks.

    first step in which anything differs
      -> digests before step 0                  initialisation
      -> digests of the step before             outside
      -> a call's input, output or gradient     input, forward, backward
      -> tokens and targets that were read      input
      -> loss or gradients, with equal calls    forward, backward, reduce    `collectives`
      -> norm                                   reduce
      -> weights, moments, copies of weights    optimizer
      -> random state alone                     input

Each is looked at only where all before it are equal, so what is found was computed from equal
things by something that did another thing. DESIGN.md has the rules.

The first row of calls in program order, all before it equal:

    input of M      whoever handed it to M: the module around M, or the data       input, forward
    output of M     M's own work, on its weights                                   forward
    gradient of M   backward of whoever consumed what M returned                   backward

What a capture leaves behind is told by the step in which graphs are captured:

    the first that draws, and the random state after the step       numbers that were drawn
    nothing but tensors that no gradient moves (experts' biases)    what forward passes count
    losses, and how many steps the optimizer has taken              a step too many, or none
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fsdp_core.config.scopes import BEGINS_AT
from harness.bisect.aligned import (
    RNG,
    STEP_COUNT,
    Legs,
    Row,
    Tensor,
    common,
    consumers,
    differ,
    listed,
    module_of,
    parent_of,
    ranks_of,
    returned_by,
    unit_of,
)
from harness.bisect.collectives import gradients_part, with_givers
from harness.bisect.found import Location
from harness.checks.evidence import BEFORE, groups_of, show_float, show_ranks
from harness.checks.exact import quantities
from harness.checks.taps import INPUT, OUTPUT
from harness.faults.fault import Phase
from harness.records import ABSENT, COPIES, DIGEST_GROUPS, SAMPLES, StepRecord

LOSS = "loss"


def where_they_part(legs: Legs) -> Location | None:
    """The first difference of two runs, as far as their records tell; None if there is none."""
    if (found := _initial_part(legs)) is not None:
        return found
    step = legs.first_step()
    if step is None:
        return None
    at_step = Location(step=step, evidence=(_step_evidence(legs, step),), before_is_equal=step > 0)
    found = record_of_the_step_before(legs, at_step) if legs.has_layouts else None
    if found is None:
        found = calls_part(legs, at_step) or _samples_part(legs, at_step)
    if found is None:
        found = _losses_part(legs, at_step)
    if found is None:
        found = gradients_part(legs, at_step) or _norm_part(legs, at_step)
    if found is None:
        found = _further_part(legs, at_step, ("buffers",), "forward")
    if found is None:
        found = _state_part(legs, at_step) or _copies_part(legs, at_step)
    if found is None:
        further = [group for group in groups_of(*_groups(legs)) if group not in DIGEST_GROUPS]
        found = _further_part(legs, at_step, further, "state") or _random_part(legs, at_step)
    if found is None:
        return replace(at_step, unknown=("what differs has no name in the records",))
    return with_capture(with_givers(found, legs), legs)


def _groups(legs: Legs) -> list[dict[str, tuple[str, ...]]]:
    return [start.tensors for start in legs.starts.values()]


def _initial_part(legs: Legs) -> Location | None:
    """What differs before anything was trained: weights first, random states last."""
    groups = sorted(groups_of(*_groups(legs)), key=lambda group: (group != "weights", group == RNG))
    at_step = Location(step=BEFORE, evidence=("the state before step 0 differs already",))
    return _further_part(legs, at_step, groups, "initialisation")


def _further_part(
    legs: Legs, at_step: Location, groups: Iterable[str], phase: Phase
) -> Location | None:
    """The first tensor that differs, of groups that are looked at in this order."""
    assert at_step.step is not None
    for group in groups:
        if bad := [t for t in legs.tensors(at_step.step, group) if t.differs]:
            names = list(dict.fromkeys(t.name for t in bad))
            told = f"of {group}, {listed(names)} {differ(len(names))}"
            missing = [t.name for t in bad if ABSENT in (t.reference, t.candidate)]
            told += f"; {listed(missing)} in one run alone" if missing else ""
            return replace(
                at_step, phase=phase, module=module_of(bad[0].name), tensor=bad[0].name,
                quantity=group, rank=bad[0].rank, ranks=ranks_of(bad, bad[0].name),
                evidence=(*at_step.evidence, told),
            )  # fmt: skip
    return None


def _step_evidence(legs: Legs, step: int) -> str:
    before = f"steps 0 to {step - 1}" if step > 1 else "step 0"
    equal = f"{before} are equal on every rank" if step > 1 else f"{before} is equal on every rank"
    if step == 0:
        equal = "the very first step differs: nothing before it was recorded"
        if legs.has_initial:
            equal = "the very first step differs, the state before it is equal on every rank"
    state = "gradients, weights, moments, " if legs.shares_state else ""
    return f"{equal}: losses, {state}random states" if step else equal


def _samples_part(legs: Legs, at_step: Location) -> Location | None:
    """No call that was looked into differs: other labels, or nothing looked at the tokens."""
    return _further_part(legs, at_step, (SAMPLES,), "input")


def _losses_part(legs: Legs, at_step: Location) -> Location | None:
    """The loss differs and no call that was looked into does."""
    assert at_step.step is not None
    floats = [each for each in legs.floats(at_step.step) if each[0] != "grad_norm"]
    if not floats:
        return None
    # The mean over ranks comes last, though it is named first.
    own = [each for each in floats if each[0] != LOSS] or floats
    quantity, rank, ours, theirs = own[0]
    ranks = tuple(sorted({r for name, r, _, _ in own if name == quantity}))
    number = quantity.removeprefix("microbatch_losses[").removesuffix("]")
    told = f"{quantity} on rank {rank}: {show_float(ours)} became {show_float(theirs)}"
    found = replace(
        at_step, phase="forward", quantity=quantity, rank=rank, ranks=ranks,
        microbatch=int(number) if number.isdigit() else None,
        evidence=(*at_step.evidence, told),
    )  # fmt: skip
    if quantity != LOSS and _is_loss_alone(legs, at_step.step):
        told = (
            "the loss alone differs, no gradient, weight, moment or random state: nothing was "
            "computed from it, so it went wrong after backward had begun, or as it was recorded"
        )
        return replace(found, phase="outside", tensor=quantity, evidence=(*found.evidence, told))
    if not legs.has_taps:
        why = "module: no module was looked into, so the input may differ as well as what it met"
        return replace(found, unknown=(*found.unknown, why))
    if quantity == LOSS:
        told = "every rank's own losses are equal: it is their mean over the ranks"
        return replace(
            found, phase="reduce", near="in", tensor=quantity, collective="all-reduce of the loss",
            evidence=(*found.evidence, told),
        )  # fmt: skip
    told = "what every module returned is equal: the loss was given other labels or other weights"
    why = "phase: labels have no digest, so the loss itself may have computed otherwise as well"
    return replace(
        found, phase="input", module=_last_module(legs, at_step.step), tensor=quantity,
        evidence=(*found.evidence, told), unknown=(*found.unknown, why),
    )  # fmt: skip


def _is_loss_alone(legs: Legs, step: int) -> bool:
    """Whether gradients were recorded and the step differs in losses only."""
    if any(name == "grad_norm" for name, *_ in legs.floats(step)):
        return False
    state = [t for group in groups_of(*_groups(legs)) for t in legs.tensors(step, group)]
    return any(t.group == "grads" for t in state) and not any(t.differs for t in state)


def _last_module(legs: Legs, step: int) -> str:
    """The one whose output the loss is made of."""
    outputs = [row.module for row in legs.rows(step) if row.kind == OUTPUT and not row.is_folded]
    return outputs[-1] if outputs else ""


def _norm_part(legs: Legs, at_step: Location) -> Location | None:
    """The gradients are equal and their norm is not."""
    assert at_step.step is not None
    floats = [each for each in legs.floats(at_step.step) if each[0] == "grad_norm"]
    if not floats:
        return None
    _, rank, ours, theirs = floats[0]
    told = f"their norm is not: {show_float(ours)} became {show_float(theirs)}"
    if (count := _steps_part(legs, at_step, told)) is not None:
        return count
    ranks = tuple(r for _, r, _, _ in floats)
    near, told = "in", "on every rank"
    if len(ranks) < len(legs.ranks(at_step.step)):
        near, told = "after", f"on {show_ranks(set(ranks))} only"
    return replace(
        at_step, phase="reduce", tensor="grad_norm", quantity="grad_norm", rank=rank, ranks=ranks,
        near="in" if near == "in" else "after", collective="all-reduce of the gradient norm",
        evidence=(
            *at_step.evidence,
            "the gradients of every rank are equal, their norm is not, "
            f"{told}: {show_float(ours)} became {show_float(theirs)}",
        ),
    )  # fmt: skip


def _steps_part(legs: Legs, at_step: Location, norm: str) -> Location | None:
    """The optimizer has taken another number of steps: that is why the norm is another, too."""
    assert at_step.step is not None
    optim = legs.tensors(at_step.step, "optim")
    bad = [t for t in optim if t.name == STEP_COUNT and t.differs]
    if not bad:
        return None
    told = f"the gradients of every rank are equal, {norm}"
    more = "the optimizer has taken another number of steps, its norm and clip with it"
    return replace(
        at_step, phase="optimizer", tensor=STEP_COUNT, quantity="optim", rank=bad[0].rank,
        ranks=ranks_of(bad, STEP_COUNT), evidence=(*at_step.evidence, told, more),
    )  # fmt: skip


def _state_part(legs: Legs, at_step: Location) -> Location | None:
    """Gradients and norm are equal, and what the optimizer keeps is not."""
    assert at_step.step is not None
    moments = [t for t in legs.tensors(at_step.step, "optim") if t.differs]
    weights = [t for t in legs.tensors(at_step.step, "weights") if t.differs]
    bad = moments or weights
    if not bad:
        return None
    count = [t for t in bad if t.name == STEP_COUNT]
    first = (count or bad)[0]
    equal = "gradients and their norm are equal on every rank"
    told = [f"{equal}, {_named(bad, first)} {differ(len({t.name for t in bad}))} after the step"]
    if not moments:
        told.append("the moments are equal: what was written is the weight, not what it comes from")
    elif not weights:
        told.append("the weights are still equal")
    name = first.name
    for suffix in (".exp_avg_sq", ".exp_avg"):
        name = name.removesuffix(suffix)
    found = replace(
        at_step, phase="optimizer", module=name.rpartition(".")[0], tensor=name,
        quantity=first.group, rank=first.rank, ranks=ranks_of(bad, first.name),
        evidence=(*at_step.evidence, *told),
    )  # fmt: skip
    if not moments and len({t.name for t in weights}) == 1:
        one = "one tensor alone is wrong: an update that went wrong in it, or a stray write"
        found = replace(found, evidence=(*found.evidence, one))
    return found


def _copies_part(legs: Legs, at_step: Location) -> Location | None:
    """Copies that are computed with differ from those of equal weights."""
    return _further_part(legs, at_step, (COPIES,), "optimizer")


def _random_part(legs: Legs, at_step: Location) -> Location | None:
    """Nothing was computed otherwise yet, but the next numbers drawn will be others."""
    assert at_step.step is not None
    bad = [t for t in legs.tensors(at_step.step, RNG) if t.differs]
    if not bad:
        return None
    first = bad[0]
    return replace(
        at_step, phase="input", tensor=first.name, quantity="rng", rank=first.rank,
        ranks=ranks_of(bad, first.name),
        evidence=(
            *at_step.evidence,
            f"only the random state {first.name} differs, on {show_ranks({t.rank for t in bad})}: "
            "the legs have drawn differently often",
        ),
    )  # fmt: skip


def _named(bad: list[Tensor], first: Tensor) -> str:
    return listed([first.name, *sorted({t.name for t in bad} - {first.name})])


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


def with_capture(found: Location, legs: Legs) -> Location:
    """The place where two runs part; of the capture, if that is what the step did otherwise."""
    config, step = legs.candidate.spec.config, found.step
    if step is None or not config.get("graph") or step != config.get("graph_warmup_steps"):
        return found
    told = _repeated(found, legs, step) or _drawn(found, legs, step) or _counted(found, legs, step)
    return replace(found, phase="capture", evidence=(*found.evidence, told)) if told else found


def _repeated(found: Location, legs: Legs, step: int) -> str:
    counts = [tensor for tensor in legs.tensors(step, "optim") if tensor.name == STEP_COUNT]
    # Whoever counted otherwise in the optimizer alone left the losses of that step as they were.
    if found.phase not in ("forward", "input") or not any(count.differs for count in counts):
        return ""
    return (
        "graphs are captured in this step, after which the optimizer has taken another number of "
        "steps: the captured step was not run, or more than once"
    )


def _drawn(found: Location, legs: Legs, step: int) -> str:
    weights = {name for start in legs.starts.values() for name in start.tensors.get("weights", ())}
    computes = found.module and any(name.rpartition(".")[0] == found.module for name in weights)
    drawn = [tensor for tensor in legs.tensors(step, "rng") if tensor.differs]
    if found.phase not in ("forward", "input") or computes or not drawn:
        return ""
    if _began_right(legs.rows(step)):
        return ""
    ranks = show_ranks({tensor.rank for tensor in drawn})
    return (
        f"graphs are captured in this step, after which the random state {drawn[0].name} differs "
        f"on {ranks}: what captures drew was not given back"
    )


def _began_right(rows: Sequence[Row]) -> bool:
    """Whether a module that draws had drawn as it should before the first thing that differs.

    What a capture leaves behind is there when the step's passes begin. A module draws if it was
    given the same and returned something else, in this step.
    """
    first = next((place for place, row in enumerate(rows) if row.differs), 0)
    given = {(r.rank, r.module, r.number) for r in rows if r.kind == INPUT and not r.differs}
    draw = {
        row.module
        for row in rows
        if row.kind == OUTPUT and row.differs and (row.rank, row.module, row.number) in given
    }
    return any(row.module in draw and row.kind == OUTPUT for row in rows[:first])


def _counted(found: Location, legs: Legs, step: int) -> str:
    moved = {name for start in legs.starts.values() for name in start.tensors.get("grads", ())}
    wrong = {tensor.name for tensor in legs.tensors(step, "weights") if tensor.differs}
    if found.phase != "optimizer" or not wrong or wrong & moved:
        return ""
    if any(tensor.differs for tensor in legs.tensors(step, "optim")):
        return ""
    return (
        f"graphs are captured in this step, and no gradient moves {found.tensor}: it follows what "
        "forward passes count, and those of warm-ups and captures stayed counted"
    )


def record_of_the_step_before(legs: Legs, at_step: Location) -> Location | None:
    """Where digests of a step are those of the step before; None if it is not that."""
    step = at_step.step
    assert step is not None
    wrong = [
        r for r in legs.ranks(step) if legs.ours[step, r].digests != legs.theirs[step, r].digests
    ]
    if not wrong or not all(_holds_the_last(legs, step, rank) for rank in wrong):
        return None
    return replace(
        at_step, phase="outside", quantity="digests", rank=wrong[0], ranks=tuple(wrong),
        evidence=(
            *at_step.evidence,
            f"the record of step {step} on {show_ranks(set(wrong))} holds the digests of step "
            f"{step - 1}, all of them",
            f"losses and norm are those of step {step}, and step {step + 1} is equal again: the "
            "state was right, the record is not",
        ),
    )  # fmt: skip


def _holds_the_last(legs: Legs, step: int, rank: int) -> bool:
    before, record = legs.theirs.get((step - 1, rank)), legs.theirs[step, rank]
    ours, theirs = legs.ours.get((step + 1, rank)), legs.theirs.get((step + 1, rank))
    if before is None or ours is None or theirs is None:
        return False
    return (
        record.digests == before.digests
        and _floats(record) == _floats(legs.ours[step, rank])
        and theirs.digests == ours.digests
    )


def _floats(record: StepRecord) -> list[tuple[str, str]]:
    return [(name, value.bits) for name, value in quantities(record)]
