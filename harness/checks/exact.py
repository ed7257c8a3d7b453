"""Bits of the state of both runs, step by step and rank by rank; and what no run may hold.

state      digests of every tensor: the lowest step first, the state before step 0 above all,
           then the group in `GROUP_ORDER`, the tensor's place, the rank
finite     no NaN and no infinity in the candidate, in the order of the computation
same_data  data-parallel ranks of a built-in run read samples of their own
"""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from fsdp_core.config import TrainConfig
from fsdp_core.layouts import dense_coordinates
from harness.checks import check
from harness.checks.evidence import (
    BEFORE,
    Options,
    Runs,
    StepTable,
    count,
    diverged,
    error,
    failed,
    groups_of,
    passed,
    rank_table,
    shared_pairs,
    show_float,
    show_ranks,
    state_table,
    step_table,
    when,
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
)

OTHER_PARTS: What = "other_parts"
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
    configs = [run.spec.config for run in (runs.reference, runs.candidate)]
    ours, theirs = map(_cut_by, configs)
    keys = sorted(key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key))
    if not keys or not runs.reference.spec.is_builtin:
        return state(runs.reference, runs.candidate)
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
    return held | {
        "engine": config.get("engine", "ours"), "fused_experts": config.get("fused_experts", False)
    }  # fmt: skip


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
    note = f"; {_of_loss(step_table(reference), step_table(candidate))}"
    places = [(at[-1], f"{group}/{name}") for at, group, name, *_ in tensors]
    pairs_of = len(differing), len(pairs)
    return diverged("state", f"{name} ({group})", found, "tensor", places, pairs_of, note)


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
    """How many tensors a record holds digests of."""
    texts = record.digests.values()
    return sum(len(text) // DIGEST_HEX_CHARS - text.count(ABSENT) for text in texts)


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
            return failed("state", "diverged", f"{message}{b or 'none'}", Difference(
                step=0, rank=rank, quantity=f"tensors.{group}", tensor=a or b, reference=a,
                candidate=b,
            ))  # fmt: skip
    return None


def _tensors(
    ours: StepRecord | InitialRecord, theirs: StepRecord | InitialRecord, start: StartRecord,
    order: Mapping[tuple[str, str], int],
) -> Iterator[tuple[tuple[int, int, int], str, str, str, str]]:  # fmt: skip
    """Every tensor of one rank whose digests differ: order, group, name, both digests."""
    for index, group in enumerate(groups_of(ours.digests, theirs.digests)):
        left, right = ours.digests.get(group, ""), theirs.digests.get(group, "")
        names = start.tensors.get(group, ())
        for place in range(max(len(left), len(right)) // DIGEST_HEX_CHARS + 1):
            window = slice(place * DIGEST_HEX_CHARS, (place + 1) * DIGEST_HEX_CHARS)
            if left[window] == right[window]:
                continue
            # A digest longer than its list of names belongs to an incomplete run; still say where.
            name = names[place] if place < len(names) else f"#{place}"
            at = (index, order.get((group, name), len(order)), ours.rank)
            a, b = (text[window].replace(ABSENT, "") or "missing" for text in (left, right))
            yield at, group, name, a, b


# --- NaN and infinity -------------------------------------------------------------------------

_Bad = tuple[tuple[int, int], int, str, str, str]
"""A place that is not finite: its order in a step, rank, quantity, tensor, what is shown of it."""


@check("finite", "no NaN and no infinity in losses, gradient norm and tensors", always="case")
def _finite(runs: Runs, _: Options) -> CheckResult:
    return finite(runs.reference, runs.candidate)


def finite(reference: RunResult, candidate: RunResult) -> CheckResult:
    """Look for the candidate's first non-finite quantity: losses, gradients, gradient norm, then
    what the optimizer wrote.

    A reference that is non-finite in the same place excuses only what is not trained, as a buffer
    that masks with infinities. A step that is skipped may have such gradients and such a norm.
    """
    ours, theirs = step_table(reference), step_table(candidate)
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
    _, rank, quantity, tensor, shown = here[0]
    record, before = ours.get((step, rank)), "missing"
    if record is not None and tensor:
        before = "non-finite" if tensor in record.nonfinite.get(quantity, ()) else "finite"
    elif record is not None:
        before = show_float(dict(quantities(record)).get(quantity))
    found = Difference(
        step=step, rank=rank, quantity=quantity, tensor=tensor, reference=before, candidate=shown
    )
    message = (
        f"{f'{tensor} ({quantity})' if tensor else quantity} is not finite {when(step)} on rank "
        f"{rank}: {shown}, in the reference {before}; {show_ranks({each[1] for each in here})} "
        "affected in that step"
    )
    if "poison" in candidate.spec.config.get("stress", ()):
        message += "; stressor poison fills buffers that nobody may read with NaN: one was read"
    return failed("finite", "nonfinite", message, found, nonfinite_pairs=len(bad))


def _nonfinite(record: StepRecord, reference: StepRecord | None) -> list[_Bad]:
    """What counts: no mask of infinities that both runs have, no gradient of a skipped step."""
    found, rank = list[_Bad](), record.rank
    for index, (name, value) in enumerate(quantities(record)):
        if not value.finite and not (record.skipped and name == "grad_norm"):
            # The norm is computed from the gradients, so a bad gradient is named before it.
            at = (2, index) if name in ("grad_norm", "evaluation") else (0, index)
            found.append((at, rank, name, "", show_float(value)))
    for index, group in enumerate(dict.fromkeys((*DIGEST_GROUPS, *sorted(record.nonfinite)))):
        if record.skipped and group == "grads":
            continue
        masks = {} if reference is None or group in DIGEST_GROUPS else reference.nonfinite
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
    """Whether another rank might read the same by chance."""
    if config.data.path is not None:
        return len(tokens) < LEAST_STEPS or len(set(tokens)) < len(tokens)
    sequences = len(tokens) * config.microbatches * config.micro_batch_size
    return sequences * math.log2(config.model.vocab_size) < LEAST_BITS
