"""Bits of both runs, step by step and rank by rank: losses, state; and what no run may hold.

loss       losses and the gradient norm, by their bits: NaN equals only the same NaN
state      digests of every tensor: the lowest step first, the state before step 0 above all,
           then the group in `GROUP_ORDER`, the tensor's place, the rank
finite     no NaN and no infinity in the candidate, in the order of the computation
same_data  data-parallel ranks of a built-in run read samples of their own
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_core.config import TrainConfig
from fsdp_core.layouts import dense_coordinates
from harness.checks.evidence import (
    BEFORE,
    StepTable,
    count,
    differ,
    error,
    failed,
    groups_of,
    of_pairs,
    passed,
    rank_table,
    shared_pairs,
    show_float,
    show_ranks,
    state_table,
    step_table,
    where,
    with_same_copies,
)
from harness.records import (
    ABSENT,
    DIGEST_GROUPS,
    DIGEST_HEX_CHARS,
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

# --- losses and norms -------------------------------------------------------------------------


def quantities(record: StepRecord) -> Iterator[tuple[str, FloatBits]]:
    """Every compared float of a step, named, in the order in which a difference is looked for."""
    if record.loss is not None:
        yield "loss", record.loss
    for index, value in enumerate(record.microbatch_losses):
        yield f"microbatch_losses[{index}]", value
    if record.grad_norm is not None:
        yield "grad_norm", record.grad_norm


def loss(reference: RunResult, candidate: RunResult) -> CheckResult:
    """Compare every loss, microbatch loss and gradient norm of the pairs that both runs hold."""
    ours, theirs = step_table(reference), step_table(candidate)
    pairs = shared_pairs(ours, theirs)
    if not pairs:
        return error("loss", "not_run", "the runs share no step of any rank: nothing to compare")
    if not any(_bits(record) for table in (ours, theirs) for record in table.values()):
        return error("loss", "not_run", "neither run recorded a loss or a norm: nothing to compare")
    differing = [key for key in pairs if _bits(ours[key]) != _bits(theirs[key])]
    figures = {"pairs": len(pairs), "differing_pairs": len(differing)}
    if not differing:
        message = "loss, microbatch losses and gradient norm equal bit for bit in "
        return passed("loss", message + count(len(pairs), "(step, rank) pair"), **figures)
    first = _first_loss(ours, theirs, differing)
    distance = "" if first.ulps is None else f", {count(first.ulps, 'ulp')} apart"
    if first.ulps == 0:
        distance = ", the sign of a zero"
    message = (
        f"{first.quantity} differs first {where(first)}{distance}; "
        f"{of_pairs(len(differing), len(pairs))} {'differs' if len(differing) == 1 else 'differ'}, "
        f"on {show_ranks({rank for _, rank in differing})}"
    )
    return failed("loss", "diverged", message, first, **figures)


def _bits(record: StepRecord) -> tuple[tuple[str, str], ...]:
    # The count of microbatches is part of the tuple's length, so a lost one differs too.
    return tuple((name, value.bits) for name, value in quantities(record))


def _first_loss(ours: StepTable, theirs: StepTable, differing: list[tuple[int, int]]) -> Difference:
    """At the lowest step a loss comes before the gradient norm, then the lowest rank."""
    step = differing[0][0]
    places = []
    for rank in (rank for at, rank in differing if at == step):
        a, b = dict(quantities(ours[step, rank])), dict(quantities(theirs[step, rank]))
        for name in a | b:
            left, right = a.get(name), b.get(name)
            if left is None or right is None or left.bits != right.bits:
                order = (name == "grad_norm", name != "loss", len(name), name, rank)
                places.append((order, rank, name, left, right))
    _, rank, name, left, right = min(places, key=lambda place: place[0])
    return Difference(
        step=step, rank=rank, quantity=name,
        reference=show_float(left), candidate=show_float(right),
        ulps=None if left is None or right is None else ulp_distance(left, right),
    )  # fmt: skip


# --- digests of the state ---------------------------------------------------------------------

NEVER = -1
OTHER_PARTS: What = "other_parts"
_SAME_PARTS = ("sequence_parallel", "dynamic_cp")
"""Keys of `parallel` that leave every rank its part of the weights."""


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    """One tensor of one rank whose digests differ; `order` sorts as the module says."""

    order: tuple[int, int, int]
    group: str
    name: str
    rank: int
    reference: str
    candidate: str


def state(reference: RunResult, candidate: RunResult) -> CheckResult:
    """Compare every digest of the (step, rank) pairs that both runs hold."""
    reference, candidate = with_same_copies(reference, candidate)
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
        message = f"{count(number, 'tensor digest')} equal in "
        message += count(len(pairs), "(step, rank) pair")
        return passed("state", message, digests=number, differing_pairs=0)
    step = differing[0][0]
    order = _tensor_order(starts)
    tensors = [
        tensor
        for key in differing
        if key[0] == step
        for tensor in _tensors(ours[key], theirs[key], starts[key[1]], order)
    ]
    first = min(tensors, key=lambda tensor: tensor.order)
    found = Difference(
        step=step, rank=first.rank, quantity=first.group, tensor=first.name,
        reference=first.reference, candidate=first.candidate,
    )  # fmt: skip
    names = {(tensor.group, tensor.name) for tensor in tensors}
    ranks = {tensor.rank for tensor in tensors}
    seen = first_steps(step_table(reference), step_table(candidate))
    message = (
        f"{first.name} ({first.group}) differs first {where(found)}; in that step "
        f"{differ(len(names), 'tensor', ranks)}, in all "
        f"{of_pairs(len(differing), len(pairs))}; {sentence(seen)}"
    )
    return failed(
        "state", "diverged", message, found, differing_tensors=len(names),
        differing_ranks=len(ranks), differing_pairs=len(differing), **seen,
    )  # fmt: skip


def first_steps(ours: StepTable, theirs: StepTable) -> dict[str, int]:
    """First step that differs by each kind of evidence, `NEVER` if none does in shared steps.

    A difference that only digests see is their reason; what the loss alone would have shown, by its
    bits or as golden files hold it, is said with every failure.
    """
    views: dict[str, Callable[[StepRecord], object]] = {
        "first_step_state": lambda record: record.digests,
        "first_step_loss_bits": lambda record: None if record.loss is None else record.loss.bits,
        "first_step_loss_5_decimals": five_decimals,
    }
    shared = sorted(set(ours) & set(theirs))
    return {
        name: min((key[0] for key in shared if view(ours[key]) != view(theirs[key])), default=NEVER)
        for name, view in views.items()
    }


def five_decimals(record: StepRecord) -> str:
    """The loss rounded to five decimals, as text; not finite is one word for all its kinds."""
    if record.loss is None:
        return "none"
    return "nan" if record.loss.value is None else f"{record.loss.value:.5f}"


def sentence(steps: Mapping[str, int]) -> str:
    """What the loss alone would have shown."""
    bits, decimals = (
        "never differ" if (step := steps[f"first_step_loss_{name}"]) == NEVER
        else f"differ first at step {step}"
        for name in ("bits", "5_decimals")
    )  # fmt: skip
    return f"the bits of the loss {bits}, its 5 decimals {decimals}"


def other_parts(reference: RunResult, candidate: RunResult) -> CheckResult | None:
    """That ranks hold other parts of the state, which then says nothing; None where they do not."""
    ours, theirs = (_cut_by(run.spec.config) for run in (reference, candidate))
    if not reference.spec.is_builtin or ours == theirs:
        return None
    keys = sorted(key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key))
    message = (
        f"not compared: {', '.join(keys)} differ, so that a rank holds other parts of the state "
        "than its counterpart; losses and taps say what can be said"
    )
    return CheckResult(check="state", outcome="skipped", what=OTHER_PARTS, message=message)


def _cut_by(config: Mapping[str, Any]) -> dict[str, object]:
    """What decides which part of the state a rank holds, by key."""
    parallel, fsdp = config.get("parallel", {}), config.get("fsdp", {})
    held = {f"parallel.{key}": n for key, n in parallel.items() if key not in _SAME_PARTS}
    for key in ("strategy", "outer_strategy"):
        # All others deal out the optimizer's rows alike.
        held[f"fsdp.{key}"] = fsdp.get(key) == "no_shard"
    return held | {"engine": config.get("engine", "ours")}


def _num_digests(record: StepRecord | InitialRecord) -> int:
    """How many tensors a record holds digests of."""
    return sum(
        len(text) // DIGEST_HEX_CHARS - (text.count(ABSENT) if ABSENT in text else 0)
        for text in record.digests.values()
    )


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
            longest = range(max(len(left), len(right)))
            pairs = [("".join(left[n : n + 1]), "".join(right[n : n + 1])) for n in longest]
            place = next((n for n, (a, b) in enumerate(pairs) if a != b), 0)
            a, b = pairs[place] if pairs else ("", "")
            message = (
                f"the runs digest different tensors: on rank {rank} tensor {place} of {group} "
                f"is {a or 'absent'} in the reference and {b or 'absent'} in the other run "
                f"({len(left)} against {len(right)} tensors)"
            )
            return failed("state", "diverged", message, Difference(
                step=0, rank=rank, quantity=f"tensors.{group}", tensor=a or b,
                reference=a, candidate=b,
            ))  # fmt: skip
    return None


def _tensor_order(starts: Mapping[int, StartRecord]) -> dict[tuple[str, str], int]:
    """Place of each (group, tensor), over all ranks: ranks may hold different tensors."""
    names = dict.fromkeys(
        (group, name)
        for _, start in sorted(starts.items())
        for group in groups_of(start.tensors)
        for name in start.tensors[group]
    )
    return {name: place for place, name in enumerate(names)}


def _tensors(
    ours: StepRecord | InitialRecord,
    theirs: StepRecord | InitialRecord,
    start: StartRecord,
    order: Mapping[tuple[str, str], int],
) -> Iterator[_Tensor]:
    for index, group in enumerate(groups_of(ours.digests, theirs.digests)):
        left, right = ours.digests.get(group, ""), theirs.digests.get(group, "")
        names = start.tensors.get(group, ())
        for place in range(max(len(left), len(right)) // DIGEST_HEX_CHARS + 1):
            window = slice(place * DIGEST_HEX_CHARS, (place + 1) * DIGEST_HEX_CHARS)
            if left[window] == right[window]:
                continue
            # A digest longer than its list of names belongs to an incomplete run; still say where.
            name = names[place] if place < len(names) else f"#{place}"
            yield _Tensor(
                order=(index, order.get((group, name), 1 << 30), ours.rank), group=group, name=name,
                rank=ours.rank, reference=_shown(left[window]), candidate=_shown(right[window]),
            )  # fmt: skip


def _shown(digest: str) -> str:
    return "missing" if digest in ("", ABSENT) else digest


# --- NaN and infinity -------------------------------------------------------------------------

_Found = tuple[tuple[int, int], str, str, str]
"""Order, quantity, tensor, shown value."""
_POISONED = (
    "; under stressor poison NaN is what lies in a pool's buffer before it is written and after it "
    "is given back: look for who reads one then"
)


def finite(reference: RunResult, candidate: RunResult) -> CheckResult:
    """Look for the candidate's first non-finite quantity.

    Within a step: losses, gradients, gradient norm, then what the optimizer wrote. A reference that
    is non-finite in the same place excuses nothing but what is not trained, as a buffer that masks
    with infinities. A step that the program skips for its gradients may have such gradients and
    such a norm, and no such loss: that of a GradScaler is recorded before it is scaled.
    """
    theirs = step_table(candidate)
    if not theirs:
        return error("finite", "not_run", "the candidate recorded no step: nothing to look at")
    ours = step_table(reference)
    bad = {
        key: places
        for key, record in theirs.items()
        if (places := list(_not_excused(record, ours.get(key))))
    }
    if not bad:
        pairs = count(len(theirs), "(step, rank) pair")
        message = f"every loss, gradient norm and tensor is finite in {pairs}"
        return passed("finite", message, pairs=len(theirs))
    step = min(bad)[0]
    here = sorted((f[0], rank, f) for (at, rank), found in bad.items() if at == step for f in found)
    _, rank, (_, quantity, tensor, shown) = here[0]
    record = ours.get((step, rank))
    same = record is not None and any(f[1:3] == (quantity, tensor) for f in nonfinite(record))
    named = f"{tensor} ({quantity})" if tensor else quantity
    tensors = sorted(f for *_, f in here if f[2])
    message = (
        f"{named} is not finite at step {step} on rank {rank}{shown and f': {shown}'}; "
        f"the reference is {'not finite there either' if same else 'finite there'}"
    )
    if tensors and not tensor:
        message += f"; first tensor {tensors[0][2]} ({tensors[0][1]})"
    message += f"; {show_ranks({rank for _, rank, _ in here})} affected in that step"
    if "poison" in candidate.spec.config.get("stress", ()):
        message += _POISONED
    found = Difference(
        step=step, rank=rank, quantity=quantity, tensor=tensor,
        reference=_shown_in(record, quantity, tensor), candidate=shown or "non-finite",
    )  # fmt: skip
    return failed("finite", "nonfinite", message, found, nonfinite_pairs=len(bad))


def _not_excused(record: StepRecord, reference: StepRecord | None) -> Iterator[_Found]:
    """What counts: no mask of infinities that both runs have, no gradient of a skipped step."""
    held = {} if reference is None else reference.nonfinite
    for found in nonfinite(record):
        _, group, tensor, _ = found
        is_state = tensor and group not in DIGEST_GROUPS
        if is_state and tensor in held.get(group, ()):
            continue
        if record.skipped and group in ("grads", "grad_norm"):
            continue
        yield found


def nonfinite(record: StepRecord) -> Iterator[_Found]:
    """Every non-finite place of a step: (order, quantity, tensor, shown value)."""
    for index, (name, value) in enumerate(quantities(record)):
        if not value.finite:
            # The norm is computed from the gradients, so a bad gradient is named before it.
            yield ((2, 0) if name == "grad_norm" else (0, index)), name, "", show_float(value)
    for index, group in enumerate(dict.fromkeys((*DIGEST_GROUPS, *sorted(record.nonfinite)))):
        for place, tensor in enumerate(record.nonfinite.get(group, ())):
            yield (1 if group == "grads" else 3 + index, place), group, tensor, ""


def _shown_in(record: StepRecord | None, quantity: str, tensor: str) -> str:
    if record is None or not tensor:
        return show_float(None if record is None else dict(quantities(record)).get(quantity))
    return "non-finite" if tensor in record.nonfinite.get(quantity, ()) else "finite"


# --- what data-parallel ranks read ------------------------------------------------------------

LEAST_BITS = 32.0
"""Of chance in all that a rank reads."""
LEAST_STEPS = 6
"""Of a user's corpus, which may be as short as a sequence: this many steps, no two alike."""


def same_data(run: RunResult, leg: str) -> CheckResult | None:
    """A failure that names the first rank that reads what a rank of another part reads, if any.

    Both runs share the sampler, so no comparison sees one that gives every rank the same. Ranks
    that differ in dp_outer, dp or cp have tokens of their own; those of tp, pp, ep and etp read the
    same. All that a rank reads in the run counts: a batch may be drawn twice by chance.

    Args:
        run: whole, see `complete.find_flaw`; of another program it is not known who shares data.
    """
    if not run.spec.is_builtin or run.spec.world_size == 1:
        return None
    # The first tensor of the group: the second, its targets, are the tokens after them.
    tokens_of = {
        rank: tuple(step.digests[SAMPLES][:DIGEST_HEX_CHARS] for step in records.steps)
        for rank, records in rank_table(run).items()
    }
    try:
        config = TrainConfig.from_dict(run.spec.config)
        places = {rank: dense_coordinates(config.parallel, rank) for rank in tokens_of}
    except (ValueError, TypeError) as wrong:
        return error("samples", "corrupt_record", f"the {leg}'s specification, config: {wrong}")
    read: dict[tuple[str, ...], int] = {}
    for rank, tokens in tokens_of.items():
        if _may_repeat(config, tokens):
            return None
        first = read.setdefault(tokens, rank)
        parts = {(at.dp_outer, at.dp, at.cp) for at in (places[first], places[rank])}
        if len(parts) == 1:
            continue
        message = (
            f"in the {leg} rank {rank} reads the tokens of rank {first} in every step "
            f"({count(len(tokens), 'step')}), though their data-parallel or context-parallel ranks "
            "differ"
        )
        found = Difference(
            step=0, rank=rank, quantity=SAMPLES, tensor=TOKENS,
            reference=tokens[0], candidate=tokens[0],
        )  # fmt: skip
        return failed("samples", "same_data", message, found, same_as_rank=first)
    return None


def _may_repeat(config: TrainConfig, tokens: tuple[str, ...]) -> bool:
    """Whether another rank might read the same by chance."""
    if config.data.path is not None:
        return len(tokens) < LEAST_STEPS or len(set(tokens)) < len(tokens)
    sequences = len(tokens) * config.microbatches * config.micro_batch_size
    return sequences * math.log2(config.model.vocab_size) < LEAST_BITS
