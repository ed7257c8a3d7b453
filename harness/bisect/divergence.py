"""Where two runs part: the step, its phase, the module, the tensor, the ranks.

    first step in which anything differs
      -> digests before step 0                  initialisation
      -> digests of the step before             outside
      -> a call's input, output or gradient     input, forward, backward
      -> tokens and targets that were read      input
      -> loss or gradients, with equal calls    forward, backward, reduce
      -> norm                                   reduce
      -> weights, moments, copies of weights    optimizer
      -> random state alone                     input

Each is looked at only where all before it are equal, so what is found was computed from equal
things by something that did another thing. The first row of calls in program order:

    input of M      whoever handed it to M: the module around M, or the data       input, forward
    output of M     M's own work, on its weights                                   forward
    gradient of M   backward of whoever consumed what M returned                   backward

A gradient is digested after it is reduced, each rank holding its rows of the sum over the ranks:

    one module's tensors, of a unit that has more       backward of the module   before
    a whole unit, or the same tensor in many layers     reduce                   in
    one rank's rows alone, where others hold some too   reduce                   after

Which rank brought it in is known from what each gave to the collective, noted on the CPU in runs
that look into modules (`harness.worker.collectives`). What a capture leaves behind is known from
the step in which graphs are captured.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from fsdp_core.config.scopes import BEGINS_AT
from harness.bisect.aligned import (
    RNG,
    Legs,
    Row,
    Tensor,
    bits,
    common,
    consumers,
    listed,
    module_of,
    parent_of,
    ranks_of,
    stem_of,
    unit_of,
)
from harness.bisect.found import Location
from harness.checks.evidence import BEFORE, groups_of, rank_table, show_float, show_ranks
from harness.checks.taps import GRADIENT, INPUT, OUTPUT
from harness.faults.fault import Phase
from harness.records import ABSENT, COPIES, DIGEST_GROUPS, SAMPLES, GivenCall, RunResult, given_in

LOSS, NORM = "loss", "grad_norm"
STEP_COUNT = "step_count"
"""Of the optimizer, in its group."""
CAPTURING = "graphs are captured in this step, before its passes, which replay them"
REDUCTIONS = ("reduce_scatter", "allreduce", "all_reduce")
GATHERS = ("allgather", "all_gather")
SUM_HIDES_RANK = "rank: the sum over ranks does not show who added what is wrong"


def where_they_part(legs: Legs) -> Location | None:
    """The first difference of two runs, as far as their records tell; None if there is none."""
    groups = groups_of(*(start.tensors for start in legs.starts.values()))
    at = Location(step=BEFORE, evidence=("the state before step 0 differs already",))
    initial = sorted(groups, key=lambda group: (group != "weights", group == RNG))
    if (found := _tensors_part(legs, at, initial, "initialisation")) is not None:
        return found
    step = legs.first_step()
    if step is None:
        return None
    at = Location(step=step, evidence=(_equal_before(legs, step),), before_is_equal=step > 0)
    further = [group for group in groups if group not in DIGEST_GROUPS]
    found = (
        _record_of_the_step_before(legs, at, step)
        or _calls_part(legs, at, step)
        or _tensors_part(legs, at, [SAMPLES], "input")
        or _losses_part(legs, at, step)
        or _gradients_part(legs, at, step)
        or _norm_part(legs, at, step)
        or _tensors_part(legs, at, ["buffers"], "forward")
        or _state_part(legs, at, step)
        or _tensors_part(legs, at, [COPIES], "optimizer")
        or _tensors_part(legs, at, further, "state")
        or _tensors_part(legs, at, [RNG], "input")
    )
    if found is None:
        return at.saying(unknown="what differs has no name in the records")
    return _with_capture(found, legs, step)


def _equal_before(legs: Legs, step: int) -> str:
    if step == 0:
        before = "the state before it is equal" if legs.has_initial else "none before is recorded"
        return f"the very first step differs, {before}"
    state = "gradients, weights, moments, " if legs.shares_state else ""
    before = f"steps 0 to {step - 1} are" if step > 1 else "step 0 is"
    return f"{before} equal on every rank: losses, {state}random states"


def _record_of_the_step_before(legs: Legs, at: Location, step: int) -> Location | None:
    """Digests of a step are those of the step before, though losses and the next step are right."""
    ours, theirs = legs.ours, legs.theirs
    wrong = [r for r in legs.ranks(step) if ours[step, r].digests != theirs[step, r].digests]
    if not legs.has_layouts or not wrong:
        return None
    for rank in wrong:
        keys = before, _, after = (step - 1, rank), (step, rank), (step + 1, rank)
        if not (before in theirs and after in ours and after in theirs):
            return None
        old, mine, later = (theirs[key] for key in keys)
        if mine.digests != old.digests or later.digests != ours[after].digests:
            return None
        if bits(mine) != bits(ours[step, rank]):
            return None
    told = f"the record of step {step} on {show_ranks({*wrong})} holds all digests of step before"
    right = f"its losses and norm are right, and step {step + 1} is equal: the state was right, too"
    return at.saying(
        told, right, phase="outside", quantity="digests", rank=wrong[0], ranks=tuple(wrong)
    )


def _tensors_part(
    legs: Legs, at: Location, groups: Iterable[str], phase: Phase, *told: str
) -> Location | None:
    """The first tensor that differs, of groups that are looked at in this order."""
    assert at.step is not None
    for group in groups:
        bad = sorted(legs.different(at.step, group), key=lambda t: t.name != STEP_COUNT)
        if bad:
            first, names = bad[0], list(dict.fromkeys(t.name for t in bad))
            name = stem_of(first.name) if group == "optim" else first.name
            missing = [t.name for t in bad if ABSENT in (t.reference, t.candidate)]
            shown = f"of {group}, {_differ(names)} on {show_ranks({t.rank for t in bad})}"
            shown += f"; {listed(missing)} in one run alone" if missing else ""
            return at.saying(
                *told, shown, phase=phase, module=module_of(first.name), tensor=name,
                quantity=group, rank=first.rank, ranks=ranks_of(bad, first.name),
            )  # fmt: skip
    return None


def _differ(names: Sequence[str]) -> str:
    return f"{listed(names)} {'differs' if len(names) == 1 else 'differ'}"


def _state_part(legs: Legs, at: Location, step: int) -> Location | None:
    """Gradients and norm are equal, and what the optimizer keeps is not."""
    weights = {t.name for t in legs.different(step, "weights")}
    told = ["gradients are equal on every rank"]
    if not legs.different(step, "optim"):
        told.append("so are moments: what was written is the weight, not what it comes from")
        if len(weights) == 1:
            told.append("one tensor alone: an update that went wrong in it, or a stray write")
    elif not weights:
        told.append("the weights are still equal")
    return _tensors_part(legs, at, ["optim", "weights"], "optimizer", *told)


# --- losses and norm --------------------------------------------------------------------------


def _floats_part(legs: Legs, at: Location, wanted: Sequence[str], **fields: Any) -> Location:
    """The first of these quantities that differs, with all ranks on which it does."""
    assert at.step is not None
    held = [each for each in legs.floats(at.step) if each[0] in wanted]
    name, rank, ours, theirs = held[0]
    told = f"{name} on rank {rank}: {show_float(ours)} became {show_float(theirs)}"
    ranks = tuple(sorted(r for other, r, _, _ in held if other == name))
    return at.saying(told, quantity=name, tensor=name, rank=rank, ranks=ranks, **fields)


def _losses_part(legs: Legs, at: Location, step: int) -> Location | None:
    """The loss differs and no call that was looked into does."""
    names = [name for name, *_ in legs.floats(step) if name != NORM]
    if not names:
        return None
    # The mean over ranks comes last, though it is named first.
    own = [name for name in names if name != LOSS]
    found = _floats_part(legs, at, own or names, phase="forward")
    number = found.quantity.removeprefix("microbatch_losses[").removesuffix("]")
    found = found.saying(microbatch=int(number) if number.isdigit() else None)
    if own and _is_loss_alone(legs, step):
        told = (
            "no gradient, weight, moment or random state does: the loss went wrong after backward "
            "had begun, or as it was recorded"
        )
        return found.saying(told, phase="outside")
    if not legs.has_taps:
        why = "module: no module was looked into, so the input may differ as well as what it met"
        return found.saying(unknown=why, tensor="")
    if not own:
        told = "every rank's own losses are equal: it is their mean over the ranks"
        return found.saying(told, phase="reduce", near="in", collective="all-reduce of the loss")
    outputs = [r.module for r in legs.rows(step) if r.kind == OUTPUT and r.microbatch is not None]
    return found.saying(
        "what every module returned is equal: the loss was given other labels or other weights",
        unknown="phase: labels have no digest, so the loss itself may have computed otherwise",
        phase="input", module=outputs[-1] if outputs else "",
    )  # fmt: skip


def _is_loss_alone(legs: Legs, step: int) -> bool:
    """Whether gradients were recorded and the step differs in losses only."""
    groups = {group for start in legs.starts.values() for group in start.tensors}
    return (
        bool(legs.tensors(step, "grads"))
        and not any(legs.different(step, group) for group in groups)
        and not any(name == NORM for name, *_ in legs.floats(step))
    )


def _norm_part(legs: Legs, at: Location, step: int) -> Location | None:
    """The gradients are equal and their norm is not; nor is the optimizer's count of steps."""
    ranks = [rank for name, rank, *_ in legs.floats(step) if name == NORM]
    if not ranks or any(t.name == STEP_COUNT for t in legs.different(step, "optim")):
        return None
    near = "after" if len(ranks) < len(legs.ranks(step)) else "in"
    return _floats_part(
        legs, at.saying("the gradients of every rank are equal"), [NORM],
        phase="reduce", near=near, collective="all-reduce of the gradient norm",
    )  # fmt: skip


# --- calls ------------------------------------------------------------------------------------


def _calls_part(legs: Legs, at: Location, step: int) -> Location | None:
    """Where calls first differ; None if they do not, or nothing was looked into."""
    rows = legs.rows(step)
    differing = [row for row in rows if row.differs]
    losses = [name for name, *_ in legs.floats(step) if name != NORM]
    if not differing or (differing[0].kind == GRADIENT and losses):
        return None  # the loss was computed before any gradient
    # A call that one run never made is no result: what came of that is the first that differs.
    first = next((row for row in differing if row.is_whole), differing[0])
    if first.kind == GRADIENT and differing[0].kind != GRADIENT:
        first = differing[0]
    same = [row for row in rows if (row.tap, row.number) == (first.tap, first.number)]
    ranks = tuple(sorted(row.rank for row in same if row.differs))
    what = f"{'gradient of the output' if first.kind == GRADIENT else first.kind} of {first.module}"
    found = at.saying(
        f"the first thing in program order that differs is the {what}, call {first.number}, on "
        f"{show_ranks({*ranks})}" if first.is_whole else _missing(first),
        *([] if first is differing[0] else [_missing(differing[0])]),
        unknown="" if first.microbatch is not None
        else f"microbatch: {first.name} covers several calls of the step",
        # A module that is called more than once a microbatch has its rows numbered by calls.
        tensor=first.tap if first.microbatch == first.number else first.name,
        microbatch=first.microbatch, quantity=f"taps.{first.kind}", rank=first.rank, ranks=ranks,
    )  # fmt: skip
    own = [r for r in rows if (r.rank, r.microbatch) == (first.rank, first.microbatch)]
    own = own if first.microbatch is not None else []
    if not first.is_whole:
        phase = "backward" if first.kind == GRADIENT else "forward"
        found = found.saying(phase=phase, module=first.module)
    elif first.kind == INPUT:
        found = _input(found, first, own, legs)
    elif first.kind == OUTPUT:
        found = _output(found, first, legs, step)
    else:
        found = _gradient(found, first, rows, own)
    if found.module != first.module or first.kind != GRADIENT:
        found = _gathered(found, len(same), legs)
    later: dict[int, Row] = {}
    for row in differing:
        if row.rank not in ranks:
            later.setdefault(row.rank, row)
    comes = [f"it comes to rank {rank} with {row.name}" for rank, row in later.items()]
    return found.saying(*sorted(comes)[:2])


def _missing(row: Row) -> str:
    run = "reference" if row.candidate else "candidate"
    return (
        f"the {run} did not call {row.module}, call {row.number}, on rank {row.rank}: something "
        "else ran in its place"
    )


def _input(found: Location, first: Row, own: Sequence[Row], legs: Legs) -> Location:
    """Nobody's output differs yet: it was made between modules, or it is data."""
    at = found.saying(phase="forward", module=first.module)
    around = parent_of(first.module, {row.module for row in legs.rows(found.step or 0)})
    same = [row for row in own if row.reference == first.reference]
    makers = [row.module for row in same if row.kind == OUTPUT]
    begins = next((row for row in own if row.stage == first.stage), None) is first
    if begins and not makers and first.stage == 0:
        what = "tokens or positions" if legs.has_layouts else "the program's own data"
        return at.saying(f"it is what the microbatch begins with: {what}", phase="input")
    if begins and first.stage > 0:
        what = f"transfer of activations to stage {first.stage} of the pipeline"
        told = "what the stage before it returned is equal"
        return at.saying(told, near="in", collective=what)
    if around in [row.module for row in same if row.kind == INPUT]:
        told = f"{around} was given it as it should be and handed on something else: its own work"
        config = legs.candidate.spec.config
        scopes = {scope for scope, part in BEGINS_AT.items() if around.endswith(f".{part}")}
        is_replayed = (found.step or 0) >= config.get("graph_warmup_steps", 0)
        if is_replayed and scopes & set(config.get("graph", ())):
            told += ", or the copy of what it was given into memory that its graph reads"
        return at.saying(told, module=around)
    if makers:
        return at.saying(f"{makers[-1]} returned it as the reference did: it changed on its way")
    if not around:
        return at.saying("no module made it: it is given to the model", phase="input")
    return at.saying(f"{around} made it from parts that are equal: its own work", module=around)


def _output(found: Location, first: Row, legs: Legs, step: int) -> Location:
    """What went in is equal, so is every part of it that was looked into."""
    told = [f"what went into {first.module} is equal"]
    if _has_weights(first.module, legs):
        if step:
            told.append(
                f"its main weights were equal after step {step - 1}: it read a copy of them that "
                "was not (stale, overwritten, of another unit), or computed otherwise"
            )
    elif legs.different(step, RNG):
        told.append("the random state differs at the end of the step, too: it drew other numbers")
    return found.saying(*told, phase="forward", module=first.module)


def _gradient(found: Location, first: Row, rows: Sequence[Row], own: Sequence[Row]) -> Location:
    """It was computed by the backward of whoever consumed the output that it belongs to."""
    known = {row.module for row in rows}
    outer, users = consumers(first, rows)
    module = common(users, known) if users else parent_of(outer, known)
    backward = (row for row in own if row.kind == GRADIENT and row.stage == first.stage)
    begins = next(backward, None) is first
    at = found.saying("every loss, and every output of the step, is equal", phase="backward")
    if begins and first.stage < max(row.stage for row in rows):
        what = f"transfer of gradients to stage {first.stage} of the pipeline"
        told = "nothing that later stages computed differs"
        return at.saying(told, module=outer, near="in", collective=what)
    if begins:
        told = "it is the first gradient of its microbatch: it comes from the loss"
        return at.saying(told, module=first.module)
    maker = f"backward of {module}" if module else "loss"
    consumed = [f"{listed(users)} consumed what {first.module} returned"] if users else []
    return at.saying(f"it is what the {maker} gave", *consumed, module=module)


def _has_weights(module: str, legs: Legs) -> bool:
    return any(name.rpartition(".")[0] == module for name in legs.names("weights"))


# --- collectives ------------------------------------------------------------------------------


def _gathered(found: Location, num_same: int, legs: Legs) -> Location:
    """On which side of the gather of a module's weights a wrong output or gradient lies."""
    world, unit = legs.world_size, unit_of(f"{found.module}.weight")
    is_read = legs.has_layouts and _has_weights(found.module, legs)
    if world == 1 or not is_read or found.phase == "input" or found.near:
        return found
    if len(found.ranks) == 1 and num_same > 1:
        told = f"the other ranks have it right: rank {found.rank}'s own copy or work is wrong"
        what = f"all-gather of the weights of {unit}"
        return found.saying(told, near="after", collective=what)
    if not len(found.ranks) == num_same == world:
        return found
    found = found.saying("it is wrong on every rank alike")
    return _by_givers(found, legs, found.module, GATHERS) or found


def _gradients_part(legs: Legs, at: Location, step: int) -> Location | None:
    """Where gradients first differ, in the order of the backward pass; None if they are equal."""
    tensors = legs.tensors(step, "grads")
    bad = _in_backward_order([t for t in tensors if t.differs], legs.rows(step))
    if not bad:
        return None
    first, names = bad[0].name, list(dict.fromkeys(t.name for t in bad))
    equal, why = "what went into every module, came out and came back is equal on every rank", ""
    if not legs.has_taps:
        equal = "the losses are equal on every rank"
        why = "phase: no module was looked into, so the gradients may have come wrong to the weight"
    found = at.saying(
        equal, f"of gradients, {_differ(names)} on {show_ranks({t.rank for t in bad})}",
        unknown=why, phase="backward", module=module_of(first), tensor=first, quantity="grads",
        rank=bad[0].rank, ranks=ranks_of(bad, first),
    )  # fmt: skip
    if legs.world_size == 1:
        return found
    if legs.has_layouts:
        found = _reduced(found, tensors, bad, names)
        if found.near == "after":
            return found
        asked = _by_givers(found, legs, first, REDUCTIONS)
        if asked is not None:
            return asked
    else:
        found = found.saying("they are recorded after any reduction over ranks")
    return found.saying(unknown=SUM_HIDES_RANK)


def _reduced(
    found: Location, tensors: Sequence[Tensor], bad: Sequence[Tensor], names: Sequence[str]
) -> Location:
    """Decide between the weight's own gradient and what brings gradients together."""
    wrong = sorted({t.rank for t in bad})
    spared = {t.rank for t in tensors if t.name in names and not t.differs}
    units = sorted({unit_of(name) for name in names})
    members = {t.name for t in tensors if unit_of(t.name) == unit_of(names[0])}
    is_whole = len(members) > 1 and members <= set(names)
    found = found.saying(collective="reduce-scatter of gradients")
    if spared and len(wrong) == 1 and len(names) > 1:
        told = "other ranks have right rows of the same tensors: its part of the reduction or later"
        return found.saying(told, phase="reduce", near="after")
    if len({module_of(name) for name in names}) == 1 and not is_whole:
        told = "the rest of its unit went through the same reduction and is equal"
        return found.saying(told, near="before")
    if not is_whole:
        told = f"they are of several modules, in {listed(units)}: what brings them together"
        return found.saying(told, phase="reduce", near="in")
    # The first of them says nothing: which rank has its rows is how the unit is cut.
    one = units[0].partition(" ")[0] if len(units) == 1 and units[0] != "root" else ""
    return found.saying(
        f"every tensor of {listed(units)} differs: they travel together",
        phase="reduce", near="in", module=one, rank=wrong[0], ranks=tuple(wrong),
    )  # fmt: skip


def _in_backward_order(bad: Sequence[Tensor], rows: Sequence[Row]) -> list[Tensor]:
    """The last module of the model first: the backward pass comes to it first."""
    backward = dict.fromkeys(row.module for row in rows if row.kind == GRADIENT)
    places = {module: place for place, module in enumerate(backward)}

    def place_of(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
        number = tuple(-int(p) for p in tensor.name.split(".") if p.isdigit())
        return places.get(module_of(tensor.name), len(places)), number

    return sorted(bad, key=place_of)


def _kind(call: GivenCall) -> tuple[str, tuple[int, ...]]:
    return call.operator, call.group


def _counted(calls: Sequence[GivenCall]) -> str:
    kinds = Counter(map(_kind, calls)).items()
    each = (f"{n} {kind} of ranks {','.join(map(str, group))}" for (kind, group), n in kinds)
    return ", ".join(each) or "no reduction"


def _entered(
    run: RunResult, rank: int, step: int, name: str, kinds: tuple[str, ...]
) -> list[GivenCall] | None:
    """The collectives of the innermost unit that holds a tensor or module; None without notes."""
    given = given_in(rank_table(run)[rank], step)
    labels = {call.label for call in given if call.label}
    around = [label for label in labels if name == label or name.startswith(f"{label}.")]
    unit = max(around, key=len, default="root")
    calls = [c for c in given if c.label == unit and c.operator.startswith(kinds)]
    return calls if given else None


def _by_givers(
    found: Location, legs: Legs, name: str, kinds: tuple[str, ...]
) -> Location | None:  # fmt: skip
    """The place by what each rank gave to the collective; None where that is not known."""
    assert found.step is not None
    sides = {
        rank: tuple(
            _entered(run, rank, found.step, name, kinds)
            for run in (legs.reference, legs.candidate)
        )
        for rank in legs.ranks(found.step)
    }  # fmt: skip
    wrong, unit, is_sum = list[int](), "root", kinds == REDUCTIONS
    if len(sides) < legs.world_size:
        return None
    for rank, (ours, theirs) in sides.items():
        if not ours or theirs is None:
            return None
        unit = ours[0].label
        if [*map(_kind, ours)] != [*map(_kind, theirs)]:
            told = f"rank {rank} entered {_counted(theirs)} for {unit} where the reference entered "
            return found.saying(told + _counted(ours), unknown=SUM_HIDES_RANK) if is_sum else None
        # Of the first collective only: what later ones are given is made of what came out.
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if _kind(a) == _kind(ours[0])]
        wrong += [rank] if any(a.digest != b.digest for a, b in pairs) else []
    into = f"into the {'reduce-scatter' if is_sum else 'all-gather'} of {unit}"
    if not wrong:
        found = found.saying(f"what every rank gave {into} is equal: the fault is in it, or later")
        is_after = is_sum and found.phase == "backward"
        return found.saying(phase="reduce", near="after") if is_after else found
    if not is_sum:
        found = found.saying(collective=f"all-gather of the weights of {unit}")
    if len(wrong) == len(sides):
        phase = "backward" if is_sum else found.phase
        return found.saying(f"every rank gave something else {into}", phase=phase, near="before")
    return found.saying(
        f"{show_ranks({*wrong})} alone gave something else {into}: it entered there",
        near="before", rank=wrong[0], ranks=tuple(wrong),
    )  # fmt: skip


# --- captures ---------------------------------------------------------------------------------


def _with_capture(found: Location, legs: Legs, step: int) -> Location:
    """The place; of the capture, if what it leaves behind is what the step did otherwise."""
    config = legs.candidate.spec.config
    if not config.get("graph") or step != config.get("graph_warmup_steps"):
        return found
    found, why = found.saying(CAPTURING), ""
    rows = legs.rows(step)
    if found.phase in ("forward", "input"):
        begins = rows and found.tensor.startswith((f"{rows[0].module}:in", f"{rows[0].module}:out"))
        drawn = [t.name for t in legs.different(step, RNG)]
        if begins and len(found.ranks) == legs.world_size:
            why = "it differs from its beginning on: it was not run, or on what a capture left"
        # Whoever counted otherwise in the optimizer alone left that step's losses as they were.
        elif any(t.name == STEP_COUNT for t in legs.different(step, "optim")):
            why = "the optimizer has taken another number of steps: it was not run once"
        elif drawn and not _has_weights(found.module, legs) and not _began_right(rows):
            why = f"the random state {drawn[0]} differs, too: what captures drew was not given back"
    elif found.phase == "optimizer" and not legs.different(step, "optim"):
        wrong = {t.name for t in legs.different(step, "weights")}
        if wrong and not wrong & legs.names("grads"):
            why = f"no gradient moves {found.tensor}: counts of warm-ups and captures were kept"
    return found.saying(why, phase="capture") if why else found


def _began_right(rows: Sequence[Row]) -> bool:
    """Whether a module that draws had drawn as it should before the first thing that differs.

    What a capture leaves behind is there when the step's passes begin. A module draws if it was
    given the same and returned something else, in this step.
    """
    first = next((place for place, row in enumerate(rows) if row.differs), 0)
    given = {(r.rank, r.module, r.number) for r in rows if r.kind == INPUT and not r.differs}
    outputs = [row for row in rows if row.kind == OUTPUT and row.differs]
    draw = {r.module for r in outputs if (r.rank, r.module, r.number) in given}
    return any(row.module in draw and row.kind == OUTPUT for row in rows[:first])
