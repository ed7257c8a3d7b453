"""Bits of the state, of losses and norms, and what no run may hold; or within a stated tolerance.

state      digests of every tensor: the lowest step first, the state before step 0 above all,
           then the group in `GROUP_ORDER`, the tensor's place, the rank
finite     no NaN and no infinity in the candidate, in the order of the computation
same_data  data-parallel ranks of a built-in run read samples of their own
loss       losses and gradient norms, by bits or within a tolerance (`harness.values`)

The bound of `rounding` is measured: docs/ARCHITECTURE.md derives it. With s the standard deviation
of the reference's samples (`harness.repeats`), the largest so far of a kind of value, t a point of
Student's distribution, u the unit roundoff:

    bound(value) = t sqrt(2) s + FLOOR_ROUNDINGS u |reference|

A reference outside of its own samples did not do what they did, as where a program draws other
numbers: there is no bound, which is an error. Where no sample rounds a value, bits of all are due.
"""

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from fsdp_core.config import TrainConfig
from fsdp_core.config.parallel import dense_coordinates
from harness.checks.complete import find_flaw
from harness.checks.evidence import (
    BEFORE,
    Options,
    Runs,
    StateTable,
    StepTable,
    alike,
    check,
    count,
    diverged,
    error,
    failed,
    groups_of,
    not_run,
    passed,
    place_in_step,
    rank_table,
    ranks_after,
    shared_pairs,
    show_float,
    show_ranks,
    state_table,
    step_table,
    when,
    where,
    with_same_groups,
)
from harness.checks.gradients import Allowed, fraction, measured, sketches, with_gradients
from harness.provenance import different
from harness.records import (
    ABSENT,
    AFTER,
    DIGEST_GROUPS,
    DIGEST_HEX_CHARS,
    OTHERS,
    SAMPLES,
    TOKENS,
    CheckResult,
    Difference,
    FloatBits,
    InitialRecord,
    RunResult,
    StartRecord,
    StepRecord,
    What,
    ulp_distance,
)
from harness.repeats import samples_of
from harness.values import Close, LossGap, Rounding, tolerance_of

OTHER_PARTS: What = "other_parts"
NO_LOSS = (
    "the runs share no recorded loss or norm: no backward pass began at one number; give losses by "
    "recorder.microbatch(loss), or leave this check out"
)
SKIPPED = FloatBits.from_bits(0x3F800000)  # 1: the optimizer left this step out
_SAME_PARTS = ("sequence_parallel", "dynamic_cp")  # keys that leave every rank its weights


def quantities(record: StepRecord) -> Iterator[tuple[str, FloatBits]]:
    """Every compared float of a step, named, in the order in which a difference is looked for."""
    if record.loss is not None:
        yield "loss", record.loss
    for index, value in enumerate(record.microbatch_losses):
        yield f"microbatch_losses[{index}]", value
    if record.grad_norm is not None:
        yield "grad_norm", record.grad_norm
    if record.skipped:
        yield "skipped", SKIPPED
    if record.evaluation is not None:
        yield "evaluation", record.evaluation


# --- digests of the state ---------------------------------------------------------------------


@check(
    "state",
    "digests of all state, tensor by tensor, the state before step 0 included",
    compares=True, is_exact=True, always="case",
)  # fmt: skip
def _state(runs: Runs, _: Options) -> CheckResult:
    """Ranks of other layouts hold other parts of the state, which then says nothing."""
    if not (keys := cut_otherwise(runs.reference, runs.candidate)):
        return state(runs.reference, runs.candidate)
    why = f"{', '.join(keys)} differ, so that ranks hold other parts of the state"
    return replace(not_run("state", why), what=OTHER_PARTS)


def cut_otherwise(*runs: RunResult) -> list[str]:
    """The keys by which ranks of two runs hold other parts of the state; none of a program."""
    ours, theirs = (_cut_by(run.spec.config) for run in runs)
    return sorted(different(ours, theirs)) if runs[0].spec.is_builtin else []


def _cut_by(config: Mapping[str, Any]) -> dict[str, object]:
    """What decides which part of the state a rank holds, by key."""
    parallel, fsdp = config.get("parallel", {}), config.get("fsdp", {})
    held = {f"parallel.{key}": n for key, n in parallel.items() if key not in _SAME_PARTS}
    for key in ("strategy", "outer_strategy"):
        # All others deal out the optimizer's rows alike.
        held[f"fsdp.{key}"] = fsdp.get(key) == "no_shard"
    return held | {
        "engine": config.get("engine", "ours"), "fused_experts": config.get("fused_experts", False)
    }  # fmt: skip


def state(reference: RunResult, candidate: RunResult) -> CheckResult:
    """Compare every digest of the (step, rank) pairs that both runs hold."""
    ends = ranks_after(reference) | ranks_after(candidate)
    reference, candidate = with_same_groups(reference, candidate)
    if (renamed := _names_differ(reference, candidate)) is not None:
        return renamed
    starts = {r: records.start for r, records in rank_table(reference).items() if records.start}
    ours, theirs = state_table(reference), state_table(candidate)
    if lone := {rank for step, rank in ours.keys() ^ theirs.keys() if step == BEFORE}:
        message = f"one run alone has a record of the state before step 0, on {show_ranks(lone)}"
        return error("state", "corrupt_record", message)
    pairs = [key for key in shared_pairs(ours, theirs) if key[1] in starts]
    if not any(_num_digests(ours[key]) for key in pairs if key[0] != BEFORE):
        message = "the runs share no digest of any tensor: nothing to compare"
        return error("state", "not_run", message)
    differing = [key for key in pairs if ours[key].digests != theirs[key].digests]
    if not differing:
        number = sum(_num_digests(ours[key]) for key in pairs)
        message = f"{count(number, 'tensor digest')} equal in {len(pairs)} (step, rank) pairs"
        if kept := ranks_after(reference):
            message += ", also after the last step"
        if lone := ends - kept:
            message += "; one run alone has its state after the last step, not compared: "
            message += show_ranks(lone)
        if left_out := sum(_num_left_out(start, ours) for start in starts.values()):
            message += f"; not compared, as only one run has them: {count(left_out, 'tensor')} "
            message += "after the last step or of modules that no optimizer trains"
        figures = {"left_out": left_out} if left_out else {}
        return passed("state", message, digests=number, differing_pairs=0, **figures)
    order: dict[tuple[str, str], int] = {}  # over all ranks, which may hold different tensors
    for start in starts.values():
        for group in groups_of(start.tensors):
            for name in start.tensors[group]:
                order.setdefault((group, name), len(order))
    step = differing[0][0]
    here = [key for key in differing if key[0] == step]
    tensors = [t for k in here for t in _tensors(ours[k], theirs[k], starts[k[1]], order)]
    (*_, rank), group, name, left, right = min(tensors)
    found = Difference(
        step=step, rank=rank, quantity=group, tensor=name, reference=left, candidate=right
    )
    steps = step_table(reference), step_table(candidate)
    skipped = left_out_alone(*steps, step)[1]
    note = f"; {skipped}" * bool(skipped) + f"; {_of_loss(*steps)}"
    places = [(at[-1], f"{group}/{name}") for at, group, name, *_ in tensors]
    pairs_of = len(differing), len(pairs)
    return diverged("state", f"{name} ({group})", found, "tensor", places, pairs_of, note)


def left_out_alone(ours: StepTable, theirs: StepTable, step: int) -> tuple[set[int], str]:
    """Ranks on which only one of the runs skipped its optimizer step, and a sentence with why."""
    both = {rank: (ours[step, rank].skipped, theirs[step, rank].skipped)
            for at, rank in ours.keys() & theirs.keys() if at == step}  # fmt: skip
    ranks = {rank for rank, (left, right) in both.items() if bool(left) != bool(right)}
    if not ranks:
        return ranks, ""
    left, right = both[min(ranks)]
    told = f"only the {'reference' if left else 'candidate'} skipped its optimizer step on "
    return ranks, f"{told}{show_ranks(ranks)}: {left or right}"


def _of_loss(ours: StepTable, theirs: StepTable) -> str:
    """What the loss alone would have shown, by its bits or as golden files hold it."""

    def first(view: Callable[[FloatBits], str]) -> str:
        for key in shared_pairs(ours, theirs):
            left, right = (table[key].loss for table in (ours, theirs))
            if (left and view(left)) != (right and view(right)):
                return f"differ first at step {key[0]}"
        return "never differ"

    decimals = first(lambda loss: "nan" if loss.value is None else f"{loss.value:.5f}")
    return f"the bits of the loss {first(lambda loss: loss.bits)}, its 5 decimals {decimals}"


def _num_digests(record: StepRecord | InitialRecord) -> int:
    texts = record.digests.values()
    return sum(len(text) // DIGEST_HEX_CHARS - text.count(ABSENT) for text in texts)


def _num_left_out(start: StartRecord, table: StateTable) -> int:
    """How many tensors of groups of `with_same_groups` one run alone holds."""
    size, number = DIGEST_HEX_CHARS, 0
    for group, names in start.tensors.items():
        if group == OTHERS or group.endswith(AFTER):
            texts = [r.digests.get(group, "") for (_, n), r in table.items() if n == start.rank]
            texts = [text for text in texts if text.strip(ABSENT[0])]
            held = (i * size for i in range(len(names)))
            number += sum(all(text[i : i + size] == ABSENT for text in texts) for i in held)
    return number


def _names_differ(reference: RunResult, candidate: RunResult) -> CheckResult | None:
    """A failure if a rank digests other tensors, or in another order, than its counterpart."""
    theirs = rank_table(candidate)
    for rank, records in rank_table(reference).items():
        start, other = records.start, theirs[rank].start if rank in theirs else None
        if start is None or other is None:
            continue
        for group in groups_of(start.tensors, other.tensors):
            left, right = start.tensors.get(group, ()), other.tensors.get(group, ())
            if left == right and (group in start.tensors) == (group in other.tensors):
                continue
            pairs = zip_longest(left, right, fillvalue="")
            a, b = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
            message = f"the runs digest different tensors of {group} on rank {rank}: {len(left)} in"
            message += f" the reference, {len(right)} in the other run; first {a or 'none'} and "
            found = Difference(step=0, rank=rank, quantity=f"tensors.{group}", tensor=a or b,
                               reference=a, candidate=b)  # fmt: skip
            return failed("state", "diverged", f"{message}{b or 'none'}", found)
    return None


def _tensors(
    ours: StepRecord | InitialRecord, theirs: StepRecord | InitialRecord, start: StartRecord,
    order: Mapping[tuple[str, str], int],
) -> Iterator[tuple[tuple[float, int, int], str, str, str, str]]:  # fmt: skip
    """Every tensor of one rank whose digests differ: order, group, name, both digests."""
    for group in groups_of(ours.digests, theirs.digests):
        left, right = ours.digests.get(group, ""), theirs.digests.get(group, "")
        names = start.tensors.get(group, ())
        for place in range(max(len(left), len(right)) // DIGEST_HEX_CHARS + 1):
            window = slice(place * DIGEST_HEX_CHARS, (place + 1) * DIGEST_HEX_CHARS)
            if left[window] == right[window]:
                continue
            # A digest longer than its list of names belongs to an incomplete run; still say where.
            name = names[place] if place < len(names) else f"#{place}"
            at = (place_in_step(group, name), order.get((group, name), len(order)), ours.rank)
            a, b = (text[window].replace(ABSENT, "") or "missing" for text in (left, right))
            yield at, group, name, a, b


# --- NaN and infinity -------------------------------------------------------------------------

_Bad = tuple[
    tuple[float, int], int, str, str, str
]  # order in the step, rank, quantity, tensor, words


@check("finite", "no NaN and no infinity in losses, gradient norm and tensors", always="case")
def finite(runs: Runs, _: Options) -> CheckResult:
    """Look for the candidate's first non-finite quantity: losses, gradients, gradient norm, what
    the optimizer wrote, then the evaluation after it.

    A reference that is non-finite in the same place excuses only what is not trained, as a buffer
    that masks with infinities. A step that is skipped may have such gradients and such a norm.
    """
    ours, theirs = step_table(runs.reference), step_table(runs.candidate)
    if not theirs:
        return error("finite", "not_run", "the candidate recorded no step: nothing to look at")
    bad = {key: each for key, record in theirs.items()
           if (each := _nonfinite(record, ours.get(key)))}  # fmt: skip
    if not bad:
        pairs = count(len(theirs), "(step, rank) pair")
        message = f"every loss, gradient norm and tensor is finite in {pairs}"
        return passed("finite", message, pairs=len(theirs))
    step = min(bad)[0]
    here = sorted(each for (at, _), places in bad.items() if at == step for each in places)
    rank, quantity, tensor, shown = here[0][1:]
    record, before = ours.get((step, rank)), "missing"
    if record is not None and tensor:
        before = "non-finite" if tensor in record.nonfinite.get(quantity, ()) else "finite"
    elif record is not None:
        before = show_float(dict(quantities(record)).get(quantity))
    found = Difference(
        step=step, rank=rank, quantity=quantity, tensor=tensor, reference=before, candidate=shown
    )
    message = f"{f'{tensor} ({quantity})' if tensor else quantity} is not finite {when(step)} on "
    message += f"rank {rank}: {shown}, in the reference {before}; "
    message += f"{show_ranks({each[1] for each in here})} affected in that step"
    if "poison" in runs.candidate.spec.config.get("stress", ()):
        message += "; stressor poison fills buffers that nobody may read with NaN: one was read"
    return failed("finite", "nonfinite", message, found, nonfinite_pairs=len(bad))


def _nonfinite(record: StepRecord, reference: StepRecord | None) -> list[_Bad]:
    """What counts: no mask of infinities that both runs have, no gradient of a skipped step."""
    found, rank = list[_Bad](), record.rank
    for index, (name, value) in enumerate(quantities(record)):
        if not value.finite and not (record.skipped and name == "grad_norm"):
            # The norm is computed from the gradients, so a bad gradient is named before it.
            at = ({"grad_norm": 2, "evaluation": math.inf}.get(name, 0), index)
            found.append((at, rank, name, "", show_float(value)))
    for index, group in enumerate(dict.fromkeys((*DIGEST_GROUPS, *sorted(record.nonfinite)))):
        if record.skipped and group == "grads":
            continue
        is_trained = group.removesuffix(AFTER) in DIGEST_GROUPS
        masks = {} if reference is None or is_trained else reference.nonfinite
        for place, tensor in enumerate(record.nonfinite.get(group, ())):
            if tensor not in masks.get(group, ()):
                at = (1 if group == "grads" else 3 + index, place)
                found.append((at, rank, group, tensor, "non-finite"))
    return found


# --- what data-parallel ranks read ------------------------------------------------------------

LEAST_BITS = 32.0  # of chance in all that a rank reads
LEAST_STEPS = 6  # of a corpus, which may be as short as a sequence: no two of them alike


def same_data(run: RunResult, leg: str) -> CheckResult | None:
    """A failure that names the first rank that reads what a rank of another part reads, if any.

    Both runs share the sampler, so no comparison sees one that gives every rank the same. Ranks
    that differ in dp_outer, dp or cp have tokens of their own; those of tp, pp, ep and etp read the
    same. All that a rank reads in a whole run counts: a batch may be drawn twice by chance.
    """
    if not run.spec.is_builtin or run.spec.world_size == 1:
        return None
    try:
        config = TrainConfig.from_dict(run.spec.config)
        places = [dense_coordinates(config.parallel, rank) for rank in range(run.spec.world_size)]
    except (ValueError, TypeError) as wrong:
        return error("samples", "corrupt_record", f"the {leg}'s specification, config: {wrong}")
    read: dict[tuple[str, ...], int] = {}
    for rank, records in rank_table(run).items():
        # The first tensor of the group: the second, its targets, are the tokens after them.
        tokens = tuple(step.digests[SAMPLES][:DIGEST_HEX_CHARS] for step in records.steps)
        if _may_repeat(config, tokens):
            return None
        first = read.setdefault(tokens, rank)
        if len({(at.dp_outer, at.dp, at.cp) for at in (places[first], places[rank])}) == 1:
            continue
        message = f"in the {leg} rank {rank} reads the tokens of rank {first} in every step, though"
        message += " their data-parallel or context-parallel ranks differ"
        found = Difference(step=0, rank=rank, quantity=SAMPLES, tensor=TOKENS)
        return failed("samples", "same_data", message, found, same_as_rank=first)
    return None


def _may_repeat(config: TrainConfig, tokens: tuple[str, ...]) -> bool:
    if config.data.path is not None:
        return len(tokens) < LEAST_STEPS or len(set(tokens)) < len(tokens)
    sequences = len(tokens) * config.microbatches * config.micro_batch_size
    return sequences * math.log2(config.model.vocab_size) < LEAST_BITS


# --- losses and norms -------------------------------------------------------------------------

FALSE_ALARM = 1e-4  # of a case: the most that a right program fails with, or has no verdict
FLOOR_ROUNDINGS = 8
_LEAST_PATTERNS = 8  # fewer numbers may end in zeros by chance
_ROUNDOFF = ((0xFFFF, 2.0**-8), (0x1FFF, 2.0**-11), (0, 2.0**-24))
"""Bits of a float32 that bfloat16 and float16 lack, and unit roundoffs."""
Place = tuple[int, int, str]  # step, rank, quantity
_Values = Mapping[Place, FloatBits]
Excess = Callable[[Place, FloatBits | None, FloatBits | None], float]
"""A gap in units of what is allowed: above 1 it is beyond."""


@check(
    "loss", "bits of losses and gradient norm, or within the tolerance of `compare.expect`",
    compares=True,
)  # fmt: skip
def within(runs: Runs, _: Options) -> CheckResult:
    """Losses of reference and candidate, by bits or within the case's tolerance."""
    reference, candidate, tolerance = runs.reference, runs.candidate, tolerance_of(runs.case.expect)
    if tolerance is None:
        return loss(reference, candidate)
    if isinstance(tolerance, LossGap):
        return _loss_gap(reference, candidate, tolerance)
    try:
        excess = tolerance.excess if isinstance(tolerance, Close) else measure(runs)
    except Unmeasured as why:
        return error("loss", why.what, str(why))
    if excess is None:
        result = loss(reference, candidate)
        message = f"no sample has rounded any of them, so bits are due: {result.message}"
        result = replace(result, message=message)
    else:
        result = _compare(
            reference, candidate, str(tolerance),
            lambda at, a, b: excess(at, _number(a), _number(b)),
        )  # fmt: skip
    return with_gradients(result, reference, candidate, _of_gradients(runs, tolerance))


def _of_gradients(runs: Runs, tolerance: Close | Rounding) -> Allowed:
    if isinstance(tolerance, Close):
        return fraction(tolerance.gradients)
    places = len(sketches(runs.reference))
    factor = quantile(FALSE_ALARM / (2 * max(places, 1)), len(runs.samples) - 1)
    return measured(runs.reference, runs.samples, factor)


def loss(reference: RunResult, candidate: RunResult) -> CheckResult:
    """Compare the bits of every loss, microbatch loss and gradient norm that a run holds."""
    return _compare(
        reference, candidate, "",
        lambda _, a, b: 0.0 if a is not None and b is not None and a.bits == b.bits else math.inf,
    )  # fmt: skip


def informative(result: CheckResult) -> CheckResult:
    """A check of digests under a tolerance: it says what differs and demands nothing."""
    if result.outcome != "failed":
        return result
    message = f"not demanded within a tolerance: {result.message}"
    return replace(result, outcome="passed", what="", message=message)


def _compare(
    reference: RunResult, candidate: RunResult, tolerance: str, excess: Excess
) -> CheckResult:
    """Every value of the pairs that both runs hold; `tolerance` in words, "" for bits."""
    pairs = set(shared_pairs(step_table(reference), step_table(candidate)))
    left, right = _values(reference), _values(candidate)
    both = [(at, left.get(at), right.get(at)) for at in left | right if at[:2] in pairs]
    if len({run.spec.config.get("evaluate_every", 0) for run in (reference, candidate)}) == 2:
        # Evaluations of one run alone, which must leave all else as it is.
        both = [each for each in both if each[0][2] != "evaluation" or None not in each]
    if tolerance:
        # A norm for which both runs left the update out is no number, and within nothing.
        skipped = {at[:2] for at in left.keys() & right.keys() if at[2] == "skipped"}
        both = [each for each in both if each[0][2] != "grad_norm" or each[0][:2] not in skipped]
    if not both:
        return error("loss", "not_run", NO_LOSS)
    gaps = [(excess(*each), *each) for each in both]
    # Equal infinities are outside of a tolerance: `finite` says so, too.
    beyond = [gap for gap in gaps if not gap[0] <= 1]
    size, at, a, b = max(gaps, key=lambda gap: (gap[0], -gap[1][0], -gap[1][1]))
    note = ""
    if tolerance:
        note = f"; the largest gap is {size:.3g} times what {tolerance} allow, of {at[2]} "
        note += where(_difference(at, a, b))
    figures = {"largest_gap": size} if tolerance and math.isfinite(size) else {}
    if not beyond:
        how = f"within {tolerance}" if tolerance else "equal bit for bit"
        message = f"{count(len(gaps), 'value')} of losses and norms {how} in {len(pairs)} (step, "
        message += f"rank) pairs{note}"
        return passed("loss", message, pairs=len(pairs), differing_pairs=0, **figures)
    _, at, a, b = min(beyond, key=lambda gap: _order(gap[1]))
    found = _difference(at, a, b)
    if not tolerance and a is not None and b is not None:
        found = replace(found, ulps=ulp_distance(a, b))
        if found.ulps is not None:
            note = f"; {count(found.ulps, 'ulp') if found.ulps else 'the sign of a zero'} apart"
    places = [(gap[1][1], gap[1][2]) for gap in beyond if gap[1][0] == at[0]]
    bad = len({gap[1][:2] for gap in beyond}), len(pairs)
    named = f"{at[2]}{f', beyond {tolerance},' if tolerance else ''}"
    result = diverged("loss", named, found, "value", places, bad, note)
    return replace(result, figures=result.figures | figures)


def _order(at: Place) -> tuple[object, ...]:
    """At the lowest step losses come before norm and evaluation, then the lowest rank."""
    step, rank, name = at
    late = {"grad_norm": 1, "skipped": 2, "evaluation": 3}.get(name, 0)
    return (step, late, name != "loss", len(name), name, rank)


def _loss_gap(reference: RunResult, candidate: RunResult, tolerance: LossGap) -> CheckResult:
    ours, theirs = _values(reference), _values(candidate)
    steps = sorted({at[0] for at in shared_pairs(step_table(reference), step_table(candidate))})
    if len(steps) < tolerance.over:
        message = f"the runs have {len(steps)} steps, the tolerance is over {tolerance.over}"
        return error("loss", "unsupported", message)
    last = steps[-tolerance.over :]
    # A rank that records no loss in either run, as in a pipeline, has no part in the mean.
    places = sorted(at for at in {*ours, *theirs} if at[0] in last and at[2] == "loss")
    if not places:
        return error("loss", "not_run", "the runs recorded no loss there: nothing to compare")
    gaps: dict[Place, float] = {}
    for at in places:
        gaps[at] = _number(theirs.get(at)) - _number(ours.get(at))
        if not math.isfinite(gaps[at]):
            found = _difference(at, ours.get(at), theirs.get(at))
            message = f"the loss is no number in both runs, {where(found)}"
            return failed("loss", "diverged", message, found)
    mean = math.fsum(_number(ours[at]) for at in places) / len(places)
    gap = math.fsum(gaps.values()) / len(places)
    worst = max(places, key=lambda at: abs(gaps[at]))
    found = _difference(worst, ours[worst], theirs[worst])
    message = f"the mean loss of the last {tolerance.over} steps is {mean:.9g} in the reference, "
    message += f"{gap:+.3g} off in the candidate, {tolerance.loss_gap:g} allowed; the largest gap "
    message += f"of one step is {gaps[worst]:+.3g}, {where(found)}"
    figures = {"reference_mean": mean, "candidate_mean": mean + gap, "gap": abs(gap)}
    if abs(gap) <= tolerance.loss_gap:
        return passed("loss", message, **figures)
    return failed("loss", "diverged", message, found, **figures)


def _difference(at: Place, left: FloatBits | None, right: FloatBits | None) -> Difference:
    return Difference(step=at[0], rank=at[1], quantity=at[2], reference=show_float(left),
                      candidate=show_float(right))  # fmt: skip


def _number(value: FloatBits | None) -> float:
    """As a float; NaN where there is none, so that it is within nothing."""
    return math.nan if value is None or value.value is None else value.value


def _values(run: RunResult) -> dict[Place, FloatBits]:
    return {
        (step, rank, name): value
        for (step, rank), record in step_table(run).items()
        for name, value in quantities(record)
    }


# --- the bounds of rounding -------------------------------------------------------------------


class Unmeasured(Exception):
    """The samples give no bound; `what` says why."""

    def __init__(self, what: What, message: str) -> None:
        super().__init__(message)
        self.what: What = what


def measure(runs: Runs) -> Callable[..., float] | None:
    """The gap of two numbers at a place in units of its bound; None if no sample rounds anything.

    Raises:
        Unmeasured: a sample is missing or not whole, lacks a value, or has one that is no number;
            or the reference is none of what the samples are.
    """
    ours, number = _values(runs.reference), len(runs.samples)
    due = [spec.key for spec in samples_of(runs.case)]
    if [run.spec.key for run in runs.samples] != due or not ours:
        message = f"expected {len(due)} samples of the reference, which records losses or norms"
        raise Unmeasured("not_run", message)
    tables = [_of_sample(runs.reference, run, n, ours) for n, run in enumerate(runs.samples, 1)]
    if all(table[place].bits == ours[place].bits for table in tables for place in ours):
        return None
    numbers = {place: [float(table[place].value or 0) for table in tables] for place in ours}
    factor = quantile(FALSE_ALARM / (2 * len(ours)), number - 1)
    deviations: dict[tuple[int, str], float] = {}
    largest: dict[str, float] = {}
    patterns: dict[str, set[int]] = {}
    for place in sorted(ours, key=lambda each: each[0]):
        kind = _kind(place)
        largest[kind] = max(largest.get(kind, 0.0), statistics.stdev(numbers[place]))
        deviations[place[0], kind] = largest[kind]
        held = patterns.setdefault(kind, set())
        held.update(int(table[place].bits, 16) for table in (ours, *tables))
    floors = {kind: FLOOR_ROUNDINGS * _roundoff(held) for kind, held in patterns.items()}

    def excess(place: Place, left: float, right: float, runs: float = math.sqrt(2)) -> float:
        """Of a gap with the standard deviation of `runs` samples; infinite if it is no number."""
        gap, kind = abs(right - left), _kind(place)
        if not math.isfinite(gap):
            return math.inf
        bound = factor * runs * deviations[place[0], kind] + floors[kind] * abs(left)
        return gap / bound if bound else (math.inf if gap else 0.0)

    for place in sorted(ours):
        if (value := ours[place].value) is None:
            continue  # is within nothing, whatever the bound
        mean = math.fsum(numbers[place]) / number
        if not (units := excess(place, value, mean, math.sqrt(1 + 1 / number))) <= 1:
            message = (
                "the reference is not what its samples of rounding are: its {2} at step {0} on "
                "rank {1} is off their mean by {3:.3g} times what rounding explains"
            ).format(*place, units)
            raise Unmeasured("unsupported", message)
    return excess


def _kind(place: Place) -> str:
    """`loss`, `microbatch_losses` or `grad_norm`."""
    return place[2].partition("[")[0]


def _roundoff(patterns: set[int]) -> float:
    formats = _ROUNDOFF if len(patterns) >= _LEAST_PATTERNS else _ROUNDOFF[-1:]
    return next(u for lacking, u in formats if not any(bits & lacking for bits in patterns))


@functools.cache
def quantile(probability: float, freedom: int) -> float:
    """The value that |T| exceeds with a probability; T is Student's, of whole degrees of freedom.

    The distribution is a finite sum in the angle a, tan a = t / sqrt(degrees of freedom)
    (Abramowitz and Stegun, Handbook of Mathematical Functions, 1964, 26.7.3 and 26.7.4).
    """
    odd, low, high = freedom % 2, 0.0, math.pi / 2  # of the angle
    for _ in range(200):
        angle = (low + high) / 2
        sine, cosine = math.sin(angle), math.cos(angle)
        term, total = cosine if odd else 1.0, 0.0
        for place in range(1, (freedom - odd) // 2 + 1):
            total += term
            term *= cosine * cosine * (2 * place - 1 + odd) / (2 * place + odd)
        tail = 1 - (2 / math.pi * (angle + sine * total) if odd else sine * total)
        low, high = (angle, high) if tail > probability else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def _of_sample(reference: RunResult, run: RunResult, number: int, ours: _Values) -> _Values:
    name = f"sample {number} of rounding (run {run.spec.key})"
    if (flaw := find_flaw(run)) is not None:
        raise Unmeasured(flaw.what, f"{name} is not whole: {flaw.message}")
    same = alike(reference, run, f"sample {number}")
    if same.outcome != "passed":
        raise Unmeasured(same.what, same.message)
    found = _values(run)
    for place, value in ours.items():
        theirs, at = found.get(place), "{2} at step {0} on rank {1}".format(*place)
        if theirs is None or (value.value is not None and theirs.value is None):
            what: What = "not_run" if theirs is None else "unsupported"
            message = f"{name}, {at}: {show_float(theirs)}, the reference has {show_float(value)}"
            raise Unmeasured(what, message)
    return found
