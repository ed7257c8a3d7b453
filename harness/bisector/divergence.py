"""Where two runs part: the step, its phase, the module, the tensor, the ranks.

    first step in which anything differs
      -> digests before step 0                  initialisation
      -> digests of the step before             outside                     `misrecorded`
      -> a call's input, output or gradient     input, forward, backward          `calls_part`
      -> tokens and targets that were read      input
      -> loss or gradients, with equal calls    forward, backward, reduce         `gradients_part`
      -> norm                                   reduce
      -> weights, moments, copies of weights    optimizer
      -> random state alone                     input

Each is looked at only where all before it are equal, so what is found was computed from equal
things by something that did another thing. DESIGN.md has the rules.
"""

from collections.abc import Iterable
from dataclasses import replace

from harness.bisector.at_capture import with_capture
from harness.bisector.flow import module_of
from harness.bisector.found import Location
from harness.bisector.givers import with_givers
from harness.bisector.gradients import gradients_part
from harness.bisector.legs import OUTPUT, RNG, STEP_COUNT, Legs, Tensor
from harness.bisector.misrecorded import record_of_the_step_before
from harness.bisector.part_of_calls import calls_part
from harness.bisector.words import differ, listed, ranks_of
from harness.checks.evidence import BEFORE, groups_of, show_float, show_ranks
from harness.faults.fault import Phase
from harness.records import ABSENT, COPIES, DIGEST_GROUPS, SAMPLES

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
