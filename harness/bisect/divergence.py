"""Where two runs part: the step, its phase, the module, the tensor, the ranks.

Both runs are laid side by side, record by record; then each of these is looked at only where all
before it are equal, so what is found was computed from equal things by something that did another:

    state before step 0 -> digests of the step before -> calls of modules in program order
      -> data that was read -> losses -> gradients -> norm -> buffers -> moments, weights
      -> compute copies -> a program's own groups -> evaluation -> random states

An input was made by whoever handed it on, an output by the module itself, a gradient by the
backward of whoever consumed the output that it belongs to. Gradients are digested after their
reduction: which rank brought it in is known from what each gave to the collective.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from fsdp_core.config import BEGINS_AT
from harness.bisect.entered import counted, entered, first_other, kind_of
from harness.bisect.found import Location, is_in, listed, module_of, parent_of, stem_of, unit_of
from harness.checks.bits import cut_otherwise, left_out_alone, quantities
from harness.checks.evidence import (
    BEFORE,
    StepTable,
    groups_of,
    rank_table,
    shared_pairs,
    show_float,
    show_ranks,
    state_table,
    step_table,
    with_groups,
    with_same_groups,
)
from harness.checks.taps import GRADIENT, INPUT, OUTPUT, Row, in_program_order, shared_rows
from harness.faults.catalogue import Phase
from harness.records import (
    ABSENT,
    COPIES,
    DIGEST_GROUPS,
    DIGEST_HEX_CHARS,
    OTHERS,
    SAMPLES,
    FloatBits,
    RunResult,
    StepRecord,
)
from harness.store.streams import aligned, with_shared_taps

RNG, LOSS, NORM, EVALUATION = "rng", "loss", "grad_norm", "evaluation"
STEP_COUNT = "step_count"
REDUCTIONS, GATHERS = ("reduce_scatter", "allreduce", "all_reduce"), ("allgather", "all_gather")


class Tensor(NamedTuple):
    """One digested tensor of one rank."""

    rank: int
    name: str
    reference: str
    candidate: str

    @property
    def differs(self) -> bool:
        return self.reference != self.candidate


class RunPair:
    """What both runs hold, on ranks where both name the same tensors; of taps those of both.

    Without `has_layouts` nobody knows how the program distributes its work; without `shares_state`
    ranks hold other parts of tensors, and of the state random states alone are compared."""

    def __init__(self, reference: RunResult, candidate: RunResult) -> None:
        self.has_layouts = reference.spec.is_builtin
        if not self.has_layouts:
            reference, candidate = aligned(reference, candidate)
        self.reference, self.candidate = reference, candidate
        self.shares_state = not cut_otherwise(reference, candidate)
        if not self.shares_state:
            reference, candidate = _random_states_of(reference), _random_states_of(candidate)
        reference, candidate = with_shared_taps(*with_same_groups(reference, candidate))
        self._states = state_table(reference), state_table(candidate)
        self.ours, self.theirs = step_table(reference), step_table(candidate)
        others = rank_table(candidate)
        self.starts = {
            rank: ours
            for rank, records in rank_table(reference).items()
            if rank in others and (ours := records.start) and (theirs := others[rank].start)
            if ours.tensors == theirs.tensors
        }
        self.pairs = [key for key in shared_pairs(self.ours, self.theirs) if key[1] in self.starts]
        self.has_taps = any(start.taps for start in self.starts.values())
        self.has_initial = all(any(step == BEFORE for step, _ in held) for held in self._states)
        self.world_size = reference.spec.world_size
        self._rows: dict[int, list[Row]] = {}

    def ranks(self, step: int) -> list[int]:
        return [rank for at, rank in self.pairs if at == step]

    def first_step(self) -> int | None:
        """The first step in which any record differs on any rank; None if none does."""
        for step, rank in self.pairs:
            ours, theirs = self.ours[step, rank], self.theirs[step, rank]
            rows = self.rows(step) if ours.taps != theirs.taps else ()
            if ours.digests != theirs.digests or bits(ours) != bits(theirs):
                return step
            if any(row.differs for row in rows if row.rank == rank):
                return step
        return None

    def rows(self, step: int) -> list[Row]:
        """Rows of all ranks in program order; without modules that ran in one run only."""
        if step not in self._rows:
            specs, rows = (self.reference.spec, self.candidate.spec), list[Row]()
            for key in ((step, rank) for rank in self.ranks(step)):
                rows += shared_rows(self.ours[key], self.theirs[key], self.starts[key[1]], specs)[0]
            self._rows[step] = [row for row in in_program_order(rows) if row.place]
        return self._rows[step]

    def floats(self, step: int) -> list[tuple[str, int, FloatBits, FloatBits]]:
        """Losses and norm of the step: quantity, rank, both values; only those that differ."""
        found = []
        for rank in self.ranks(step):
            ours, theirs = (dict(quantities(s[step, rank])) for s in (self.ours, self.theirs))
            found += [(n, rank, a, theirs[n]) for n, a in ours.items() if n in theirs]
        return [each for each in found if each[2].bits != each[3].bits]

    def losses(self, step: int) -> list[str]:
        """Those that were trained on and differ, by name."""
        return [name for name, *_ in self.floats(step) if name not in (NORM, EVALUATION)]

    def tensors(self, step: int, group: str) -> list[Tensor]:
        """Every digest of a group, in the order of the reference, then ranks."""
        found = []
        for rank, start in self.starts.items():
            states = [held[step, rank] for held in self._states if (step, rank) in held]
            texts = [state.digests.get(group, "") for state in states]
            for place, name in enumerate(start.tensors.get(group, ()) if len(texts) == 2 else ()):
                window = slice(place * DIGEST_HEX_CHARS, (place + 1) * DIGEST_HEX_CHARS)
                found.append(Tensor(rank, name, texts[0][window], texts[1][window]))
        order = {name: place for place, name in enumerate(dict.fromkeys(t.name for t in found))}
        return sorted(found, key=lambda tensor: (order[tensor.name], tensor.rank))

    def different(self, step: int, group: str) -> list[Tensor]:
        return [tensor for tensor in self.tensors(step, group) if tensor.differs]

    def names(self, group: str) -> set[str]:
        return {name for start in self.starts.values() for name in start.tensors.get(group, ())}

    def has_weights(self, module: str) -> bool:
        return any(name.rpartition(".")[0] == module for name in self.names("weights"))


def _random_states_of(run: RunResult) -> RunResult:
    alone = with_groups(run, lambda _, group: group == RNG)
    return replace(alone, ranks=tuple(replace(records, initial=None) for records in alone.ranks))


def bits(record: StepRecord) -> list[tuple[str, str]]:
    """Losses and norm of a record by name, as bit patterns."""
    return [(name, value.bits) for name, value in quantities(record)]


# --- names ------------------------------------------------------------------------------------


def _common(modules: Sequence[str], known: Collection[str]) -> str:
    """The module itself, or of several the closest known one that holds all of them."""
    module = modules[0]
    while module and not all(f"{other}.".startswith(f"{module}.") for other in modules):
        module = module.rpartition(".")[0]
    return module if module in known or len(set(modules)) == 1 else parent_of(module, known)


def _consumers(row: Row, rows: Sequence[Row]) -> tuple[str, list[str]]:
    """The outermost module that returns what the row's does, the innermost that were given it."""
    own = row.module
    output = (own, OUTPUT, row.number, row.rank)
    given = next((r.reference for r in rows if (r.module, r.kind, r.number, r.rank) == output), "")
    same = [r for r in rows if given and (r.rank, r.microbatch) == (row.rank, row.microbatch)]
    same = [r for r in same if r.reference == given]
    around = [r.module for r in same if r.kind == OUTPUT and is_in(own, r.module)]
    users = dict.fromkeys(
        r.module for r in same if r.kind == INPUT
        and own != r.module and not is_in(own, r.module) and not is_in(r.module, own)
    )  # fmt: skip
    innermost = [name for name in users if not any(is_in(u, name) for u in users)]
    outermost = (name for name in around if not any(is_in(name, other) for other in around))
    return next(outermost, own), innermost


# --- the first difference ---------------------------------------------------------------------


def first_difference(pair: RunPair) -> Location | None:
    """The first difference of two runs, as far as their records tell; None if there is none."""
    groups = groups_of(*(start.tensors for start in pair.starts.values()))
    at = Location(step=BEFORE, evidence=("the state before step 0 differs already",))
    initial = sorted(groups, key=lambda group: (group != "weights", group == RNG))
    if (found := _tensors_part(pair, at, BEFORE, initial, "initialisation")) is not None:
        return found
    step = pair.first_step()
    if step is None:
        return None
    at = Location(step=step, evidence=(_equal_before(pair, step),), before_is_equal=step > 0)
    further = [group for group in groups if group not in DIGEST_GROUPS]
    found = (
        _record_of_the_step_before(pair, at, step)
        or _calls_part(pair, at, step)
        or _tensors_part(pair, at, step, [SAMPLES], "input")
        or _losses_part(pair, at, step)
        or _skipped_part(pair, at, step)
        or _gradients_part(pair, at, step)
        or _norm_part(pair, at, step)
        or _tensors_part(pair, at, step, ["buffers"], "forward")
        or _tensors_part(pair, at, step, ["optim", "weights"], "optimizer", "gradients are equal")
        or _tensors_part(pair, at, step, [COPIES], "optimizer")
        or _tensors_part(pair, at, step, further, "state")
        or _evaluation_part(pair, at, step)
        or _tensors_part(pair, at, step, [RNG], "input")
        or at.saying(unknown="what differs has no name in the records")
    )
    return _with_capture(found, pair, step)


def _equal_before(pair: RunPair, step: int) -> str:
    if step == 0:
        before = "the state before it is equal" if pair.has_initial else "none before is recorded"
        return f"the very first step differs, {before}"
    state = "gradients, weights, moments, " if pair.shares_state else ""
    return f"every step before step {step} is equal on every rank: losses, {state}random states"


def _record_of_the_step_before(pair: RunPair, at: Location, step: int) -> Location | None:
    """Digests of the step before, though the next step is right: state cannot go wrong for one."""
    ours, theirs = pair.ours, pair.theirs
    wrong = [r for r in pair.ranks(step) if ours[step, r].digests != theirs[step, r].digests]

    def is_old(held: StepTable, right: StepTable, rank: int) -> bool:
        before, here, after = (step - 1, rank), (step, rank), (step + 1, rank)
        if before not in held or after not in held or after not in right:
            return False
        follows = (right[after].digests, bits(right[here]))
        is_right = (held[after].digests, bits(held[here])) == follows
        return is_right and held[here].digests == held[before].digests

    sides = {"candidate": (theirs, ours), "reference": (ours, theirs)}
    old = (name for name, side in sides.items() if all(is_old(*side, rank) for rank in wrong))
    if not pair.has_layouts or not wrong or not (whose := next(old, "")):
        return None
    ranks = tuple(wrong)
    told = f"of the {whose} the record of step {step} on {show_ranks({*wrong})} "
    told += "holds all digests of the step before"
    right = f"its losses are right, and step {step + 1} is equal: so was the state"
    return at.saying(told, right, phase="outside", quantity="digests", rank=ranks[0], ranks=ranks)


def _ranks_of(tensors: Iterable[Tensor], name: str) -> tuple[int, ...]:
    return tuple(sorted({tensor.rank for tensor in tensors if tensor.name == name}))


def _differ(tensors: Sequence[Tensor]) -> str:
    sides = {t.name: (t.reference, t.candidate) for t in tensors}
    told = f"{listed([*sides])} {'differs' if len(sides) == 1 else 'differ'} on "
    missing = [name for name, held in sides.items() if "" in held or ABSENT in held]
    alone = f"; {listed(missing)} in one run alone" if missing else ""
    return f"{told}{show_ranks({t.rank for t in tensors})}{alone}"


def _tensors_part(
    pair: RunPair, at: Location, step: int, groups: Iterable[str], phase: Phase, *told: str
) -> Location | None:
    """The first tensor that differs, of groups that are looked at in this order."""
    for group in groups:
        bad = sorted(pair.different(step, group), key=lambda t: t.name != STEP_COUNT)
        if bad:
            first = bad[0]
            return at.saying(
                *told, f"of {group}, {_differ(bad)}",
                phase=phase, module=module_of(first.name), quantity=group,
                tensor=stem_of(first.name) if group == "optim" else first.name,
                rank=first.rank, ranks=_ranks_of(bad, first.name),
            )  # fmt: skip
    return None


# --- losses and norm --------------------------------------------------------------------------


def _floats_part(pair: RunPair, at: Location, step: int, wanted: Sequence[str]) -> Location:
    """The first of these quantities that differs, with all ranks on which it does."""
    held = [each for each in pair.floats(step) if each[0] in wanted]
    name, rank, ours, theirs = held[0]
    told = f"{name} on rank {rank}: {show_float(ours)} became {show_float(theirs)}"
    ranks = tuple(sorted(r for other, r, _, _ in held if other == name))
    return at.saying(told, quantity=name, tensor=name, rank=rank, ranks=ranks, phase="forward")


def _losses_part(pair: RunPair, at: Location, step: int) -> Location | None:
    """The loss differs and no call that was looked into does."""
    names = pair.losses(step)
    if not names:
        return None
    own = [name for name in names if name != LOSS]  # their mean comes last
    found = _floats_part(pair, at, step, own or names)
    number = found.quantity.removeprefix("microbatch_losses[").removesuffix("]")
    found = found.saying(microbatch=int(number) if number.isdigit() else None)
    if own and _is_loss_alone(pair, step):
        told = (
            "no gradient, weight, moment or random state does: the loss went wrong after backward "
            "had begun, or as it was recorded"
        )
        return found.saying(told, phase="outside")
    if not pair.has_taps:
        why = "module: no module was looked into, so the input may differ as well as what it met"
        return found.saying(unknown=why, tensor="")
    if not own:
        told = "every rank's own losses are equal: it is their mean over the ranks"
        return found.saying(told, phase="reduce", near="in", collective="all-reduce of the loss")
    outputs = [r.module for r in pair.rows(step) if r.kind == OUTPUT and r.microbatch is not None]
    apart = [t.name for group in ("frozen", OTHERS) for t in pair.different(step, group)]
    more = [f"{name} differs, too, as the step ends: no optimizer trains it" for name in apart[:1]]
    return found.saying(
        "what every module returned is equal: the loss was given other labels or other weights",
        *more,
        unknown="phase: labels have no digest, so the loss itself may have computed otherwise",
        phase="input", module=outputs[-1] if outputs else "",
    )  # fmt: skip


def _is_loss_alone(pair: RunPair, step: int) -> bool:
    """Whether gradients were recorded and the step differs in losses only."""
    groups = {group for start in pair.starts.values() for group in start.tensors}
    others = any(pair.different(step, group) for group in groups)
    others |= any(name == NORM for name, *_ in pair.floats(step))
    return bool(pair.tensors(step, "grads")) and not others


def _norm_part(pair: RunPair, at: Location, step: int) -> Location | None:
    """The gradients are equal and their norm is not; nor is the optimizer's count of steps."""
    ranks = [rank for name, rank, *_ in pair.floats(step) if name == NORM]
    if not ranks or any(t.name == STEP_COUNT for t in pair.different(step, "optim")):
        return None
    if not pair.shares_state:
        at = at.saying(unknown="phase: gradients are cut otherwise in each run, and not compared")
        return _floats_part(pair, at, step, [NORM]).saying(phase="backward")
    at = _floats_part(pair, at.saying("the gradients of every rank are equal"), step, [NORM])
    near = "after" if len(ranks) < len(pair.ranks(step)) else "in"
    return at.saying(phase="reduce", near=near, collective="all-reduce of the gradient norm")


def _evaluation_part(pair: RunPair, at: Location, step: int) -> Location | None:
    """Nothing that the step left behind differs, but the loss of the evaluation after it."""
    if all(name != EVALUATION for name, *_ in pair.floats(step)):
        return None
    told = "what the step computed and left behind is equal: the evaluation after it went wrong"
    at = at.saying(told, unknown="module: calls of an evaluation are not recorded")
    return _floats_part(pair, replace(at, rank_is_hidden=pair.world_size > 1), step, [EVALUATION])


# --- calls ------------------------------------------------------------------------------------


def _calls_part(pair: RunPair, at: Location, step: int) -> Location | None:
    """Where calls first differ; None if they do not, or nothing was looked into."""
    rows = [row for row in pair.rows(step) if not row.is_unclipped]
    differing = [row for row in rows if row.differs]
    if not differing or _follows_a_loss(differing[0], pair, step):
        return None
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
        found = _input(found, first, own, pair, step)
    elif first.kind == OUTPUT:
        found = _output(found, first, pair, step)
    else:
        found = _gradient(found, first, rows, own)
    if found.module != first.module or first.kind != GRADIENT:
        found = _gathered(found, {row.rank for row in same}, pair, step)
    later: dict[int, str] = {}
    for row in (row for row in differing if row.rank not in ranks):
        later.setdefault(row.rank, row.name)
    return found.saying(*(f"it comes to rank {r} with {later[r]}" for r in sorted(later)[:2]))


def _follows_a_loss(row: Row, pair: RunPair, step: int) -> bool:
    """Whether it is a gradient of a microbatch whose loss differs; a later one's loss may."""
    own = [name for name in pair.losses(step) if name != LOSS]
    is_known = own and row.microbatch is not None
    before = f"microbatch_losses[{row.microbatch}]" in own if is_known else pair.losses(step)
    return row.kind == GRADIENT and bool(before)


def _missing(row: Row) -> str:
    run = "reference" if row.candidate else "candidate"
    told = f"the {run} did not call {row.module}, call {row.number}, on rank {row.rank}"
    return f"{told}: something else ran in its place"


def _input(found: Location, first: Row, own: Sequence[Row], pair: RunPair, step: int) -> Location:
    """Nobody's output differs yet: it was made between modules, or it is data."""
    at = found.saying(phase="forward", module=first.module)
    around = parent_of(first.module, {r.module for r in pair.rows(step) if r.kind == INPUT})
    same = [row for row in own if row.reference == first.reference]
    makers = [row.module for row in same if row.kind == OUTPUT]
    begins = next((row for row in own if row.stage == first.stage), None) is first
    if begins and not makers and first.stage == 0:
        what = "tokens or positions" if pair.has_layouts else "the program's own data"
        return at.saying(f"it is what the microbatch begins with: {what}", phase="input")
    if begins and first.stage > 0:
        what = f"transfer of activations to stage {first.stage} of the pipeline"
        return at.saying("what the stage before it returned is equal", near="in", collective=what)
    if around in [row.module for row in same if row.kind == INPUT]:
        told = f"{around} was given it as it should be and handed on something else: its own work"
        config = pair.candidate.spec.config
        scopes = {scope for scope, part in BEGINS_AT.items() if around.endswith(f".{part}")}
        if step >= config.get("graph_warmup_steps", 0) and scopes & set(config.get("graph", ())):
            told += ", or the copy of what it was given into memory that its graph reads"
        return at.saying(told, module=around)
    if makers:
        return at.saying(f"{makers[-1]} returned it as the reference did: it changed on its way")
    if not around:
        return at.saying("no module made it: it is given to the model", phase="input")
    return at.saying(f"{around} made it from parts that are equal: its own work", module=around)


def _output(found: Location, first: Row, pair: RunPair, step: int) -> Location:
    """What went in is equal, so is every part of it that was looked into."""
    told = [f"what went into {first.module} is equal"]
    if step and pair.has_weights(first.module):
        what = "it read a copy of them that was not (stale, overwritten, of another unit)"
        if not pair.has_layouts:
            what = "they were written after that step"
        told.append(
            f"its main weights were equal after step {step - 1}: {what}, or it computed otherwise"
        )
    elif not pair.has_weights(first.module) and pair.different(step, RNG):
        told.append("the random state differs at the end of the step, too: it drew other numbers")
    return found.saying(*told, phase="forward", module=first.module)


def _gradient(found: Location, first: Row, rows: Sequence[Row], own: Sequence[Row]) -> Location:
    """It was computed by the backward of whoever consumed the output that it belongs to."""
    known = {row.module for row in rows}
    outer, users = _consumers(first, rows)
    module = _common(users, known) if users else parent_of(outer, known)
    backward = (row for row in own if row.kind == GRADIENT and row.stage == first.stage)
    begins = next(backward, None) is first
    at = found.saying("every loss and every output before it is equal", phase="backward")
    if begins and first.stage < max(row.stage for row in rows):
        what = f"transfer of gradients to stage {first.stage} of the pipeline"
        told = "nothing that later stages computed differs"
        return at.saying(told, module=outer, near="in", collective=what)
    if begins:
        told = "it is the first gradient of its microbatch: it comes from the loss"
        return at.saying(told, module=first.module)
    consumed = f"{listed(users)} consumed what {first.module} returned"
    maker = f"it is what the {f'backward of {module}' if module else 'loss'} gave"
    return at.saying(maker, *([consumed] if users else []), module=module)


# --- collectives ------------------------------------------------------------------------------


def _gathered(found: Location, holders: set[int], pair: RunPair, step: int) -> Location:
    """On which side of the gather of a module's weights a wrong output or gradient lies."""
    is_read = pair.has_layouts and pair.has_weights(found.module)
    if pair.world_size == 1 or not is_read or found.phase == "input" or found.near:
        return found
    odd = first_other(pair.reference, pair.candidate, holders, step)
    if odd.isdisjoint(found.ranks) and odd:
        told = f"{show_ranks(odd)} entered another collective before, or gave something else to it"
        return found.saying(told, near="before", rank=min(odd), ranks=tuple(sorted(odd)))
    if len(found.ranks) == 1 and len(holders) > 1:
        told = f"the other ranks have it right: rank {found.rank}'s own copy or work is wrong"
        what = f"all-gather of the weights of {unit_of(f'{found.module}.weight')}"
        return found.saying(told, near="after", collective=what)
    if not len(found.ranks) == len(holders) == pair.world_size:
        return found
    found = found.saying("it is wrong on every rank alike")
    return _by_givers(found, pair, step, found.module, GATHERS) or found


def _skipped_part(pair: RunPair, at: Location, step: int) -> Location | None:
    """A step that one run alone left out, of whose gradients there are no other digests."""
    ranks, told = left_out_alone(pair.ours, pair.theirs, step)
    is_gradient = any(row.differs and row.is_unclipped for row in pair.rows(step)) or any(
        t.rank not in ranks or ABSENT not in (t.reference, t.candidate)
        for t in pair.different(step, "grads")
    )
    if not ranks or is_gradient:
        return None
    unknown = "tensor: gradients of a step that is left out are not recorded"
    return at.saying(
        told, unknown=unknown, phase="optimizer", quantity="skipped",
        rank=min(ranks), ranks=tuple(sorted(ranks)),
    )  # fmt: skip


def _gradients_part(pair: RunPair, at: Location, step: int) -> Location | None:
    """Where gradients first differ, in the order of the backward pass; None if they are equal."""
    tensors, rows = pair.tensors(step, "grads"), pair.rows(step)
    before = [Tensor(row.rank, row.module, row.reference, row.candidate)
              for row in rows if row.is_unclipped]  # fmt: skip
    wrong = [tensor for tensor in before if tensor.differs]
    bad = _in_backward_order(wrong or [t for t in tensors if t.differs], rows)
    if not bad:
        return None
    first, clips = bad[0].name, [table[step, bad[0].rank].grad_norm is not None
                                 for table in (pair.ours, pair.theirs)]  # fmt: skip
    equal, why = "what went into every module, came out and came back is equal on every rank", ""
    if not pair.has_taps:
        equal = "the losses are equal on every rank"
        why = "phase: no module was looked into, so the gradients may have come wrong to the weight"
    found = at.saying(
        equal, f"of gradients{' before clipping' * bool(wrong)}, {_differ(bad)}",
        unknown=why, phase="backward", module=module_of(first), tensor=first, quantity="grads",
        rank=bad[0].rank, ranks=_ranks_of(bad, first),
    )  # fmt: skip
    if not wrong and (before or clips[0] != clips[1]):
        whose = "reference" if clips[0] else "candidate"
        alone = f"the {whose} alone computes their norm, as clipping does"
        told = "before clipping they are equal" if before else alone
        return found.saying(told, phase="optimizer", module="")
    if pair.world_size == 1:
        return found
    if not pair.has_layouts:
        of_ranks = [t for t in before or tensors if t.name == first]
        weights = {t.reference for t in pair.tensors(step, "weights") if t.name == first}
        is_one = len(weights) == len({t.reference for t in of_ranks}) == 1
        if is_one and len({t.candidate for t in of_ranks}) > 1:
            told = "all ranks of the reference have one gradient of it, those of the candidate do "
            return found.saying(f"{told}not: it was not reduced", phase="reduce")
        told = "they are recorded after their accumulation, and any reduction over ranks"
        return found.saying(told, rank_is_hidden=True)
    found = _reduced(found, tensors, bad)
    asked = _by_givers(found, pair, step, first, REDUCTIONS) if found.near != "after" else found
    return asked or found.saying(rank_is_hidden=True)


def _reduced(found: Location, tensors: Sequence[Tensor], bad: Sequence[Tensor]) -> Location:
    """Decide between the weight's own gradient and what brings gradients together."""
    names = list(dict.fromkeys(t.name for t in bad))
    wrong = sorted({t.rank for t in bad})
    spared = any(t.name in names and not t.differs for t in tensors)
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
    backward = list(dict.fromkeys(row.module for row in rows if row.kind == GRADIENT))

    def place_of(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
        number = tuple(-int(p) for p in tensor.name.split(".") if p.isdigit())
        module = module_of(tensor.name)
        return (*backward, module).index(module), number

    return sorted(bad, key=place_of)


def _by_givers(
    found: Location, pair: RunPair, step: int, name: str, kinds: tuple[str, ...]
) -> Location | None:
    """The place by what each rank gave to the collective; None where that is not known."""
    wrong, unit, is_sum, ranks = list[int](), "root", kinds == REDUCTIONS, pair.ranks(step)
    for rank in ranks:
        runs = pair.reference, pair.candidate
        ours, theirs = (entered(run, rank, step, name, kinds) for run in runs)
        if len(ranks) < pair.world_size or not ours or theirs is None:
            return None
        unit = ours[0].label
        if [*map(kind_of, ours)] != [*map(kind_of, theirs)]:
            told = f"rank {rank} entered {counted(theirs)} for {unit} where the reference entered "
            return found.saying(told + counted(ours), rank_is_hidden=True) if is_sum else None
        # Of the first collective only: what later ones are given is made of what came out.
        first = kind_of(ours[0])
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if kind_of(a) == first]
        wrong += [rank] if any(a.digest != b.digest for a, b in pairs) else []
    into = f"into the {'reduce-scatter' if is_sum else 'all-gather'} of {unit}"
    if not wrong:
        found = found.saying(f"what every rank gave {into} is equal: the fault is in it, or later")
        is_after = is_sum and found.phase == "backward"
        return found.saying(phase="reduce", near="after") if is_after else found
    if not is_sum:
        found = found.saying(collective=f"all-gather of the weights of {unit}")
    if len(wrong) == len(ranks):
        phase = "backward" if is_sum else found.phase
        return found.saying(f"every rank gave something else {into}", phase=phase, near="before")
    return found.saying(
        f"{show_ranks({*wrong})} alone gave something else {into}: it entered there",
        near="before", rank=wrong[0], ranks=tuple(wrong),
    )  # fmt: skip


# --- captures ---------------------------------------------------------------------------------


def _with_capture(found: Location, pair: RunPair, step: int) -> Location:
    """The place; of the capture, if what it leaves behind is what the step did otherwise."""
    config = pair.candidate.spec.config
    if not config.get("graph") or step != config.get("graph_warmup_steps"):
        return found
    told, why = "graphs are captured in this step, before its passes, which replay them", ""
    rows = pair.rows(step)
    if found.phase in ("forward", "input"):
        begins = rows and found.tensor.startswith((f"{rows[0].module}:in", f"{rows[0].module}:out"))
        drawn = [t.name for t in pair.different(step, RNG)]
        if begins and len(found.ranks) == pair.world_size:
            why = "it differs from its beginning on: it was not run, or on what a capture left"
        # Whoever counted otherwise in the optimizer alone left that step's losses as they were.
        elif any(t.name == STEP_COUNT for t in pair.different(step, "optim")):
            why = "the optimizer has taken another number of steps: it was not run once"
        elif drawn and not pair.has_weights(found.module) and not _began_right(rows):
            why = f"the random state {drawn[0]} differs, too: what captures drew was not given back"
    elif found.phase == "optimizer" and not pair.different(step, "optim"):
        wrong = {t.name for t in pair.different(step, "weights")}
        if wrong and not wrong & pair.names("grads"):
            why = f"no gradient moves {found.tensor}: counts of warm-ups and captures were kept"
    return found.saying(told, why, phase="capture") if why else found.saying(told)


def _began_right(rows: Sequence[Row]) -> bool:
    """Whether a module that draws had drawn as it should before the first thing that differs.

    It draws if it was given the same and returned something else, in this step.
    """
    first = next((place for place, row in enumerate(rows) if row.differs), 0)
    given = {(r.rank, r.module, r.number) for r in rows if r.kind == INPUT and not r.differs}
    outputs = [row for row in rows if row.kind == OUTPUT and row.differs]
    draw = {r.module for r in outputs if (r.rank, r.module, r.number) in given}
    return any(row.module in draw and row.kind == OUTPUT for row in rows[:first])
