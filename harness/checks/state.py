"""Digests of gradients, main weights, optimizer state and RNG, tensor by tensor, on every rank.

The first difference is the lowest step, the state before step 0 first, then the group in
`GROUP_ORDER` (gradients are made before the weights that they change), then the tensor's place,
then the rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.checks.answer import error, failed, passed, refuse_parameters
from harness.checks.evidence import (
    BEFORE,
    StepTable,
    count,
    groups_of,
    rank_table,
    shared_pairs,
    show_ranks,
    state_table,
    step_table,
    when,
    with_same_copies,
)
from harness.records import (
    ABSENT,
    DIGEST_HEX_CHARS,
    CheckResult,
    Difference,
    InitialRecord,
    RunResult,
    StartRecord,
    StepRecord,
    What,
)

NAME = "state"
NEVER = -1
OTHER_PARTS: What = "other_parts"
_SAME_PARTS = ("sequence_parallel", "dynamic_cp")
"""Keys of `parallel` that leave every rank its part of the weights."""


@dataclass(frozen=True, kw_only=True)
class _Place:
    """One tensor of one rank whose digests differ; `order` sorts as the module says."""

    order: tuple[int, int, int]
    group: str
    tensor: str
    rank: int
    reference: str
    candidate: str


def check(
    reference: RunResult, candidate: RunResult, parameters: Mapping[str, object]
) -> CheckResult:
    """Compare every digest of the (step, rank) pairs that both runs hold."""
    if (refusal := refuse_parameters(NAME, parameters)) is not None:
        return refusal
    reference, candidate = with_same_copies(reference, candidate)
    if (renamed := _names_differ(reference, candidate)) is not None:
        return renamed
    starts = {
        rank: records.start
        for rank, records in rank_table(reference).items()
        if records.start is not None
    }
    ours, theirs = state_table(reference), state_table(candidate)
    if lone := [rank for step, rank in ours.keys() ^ theirs.keys() if step == BEFORE]:
        told = f"one run alone has a record of the state before step 0, on {show_ranks(set(lone))}"
        return error(NAME, "corrupt_record", told)
    pairs = [key for key in shared_pairs(ours, theirs) if key[1] in starts]
    num_tensors = sum(map(_num_digests, (ours[key] for key in pairs)))
    if not any(_num_digests(ours[key]) for key in pairs if key[0] != BEFORE):
        return error(NAME, "not_run", "the runs share no digest of any tensor: nothing to compare")
    differing = [key for key in pairs if ours[key].digests != theirs[key].digests]
    if not differing:
        return passed(
            NAME,
            f"{count(num_tensors, 'tensor digest')} equal in "
            f"{count(len(pairs), '(step, rank) pair')}",
            digests=num_tensors,
            differing_pairs=0,
        )
    step = differing[0][0]
    order = _tensor_order(starts)
    places = [
        place
        for key in differing
        if key[0] == step
        for place in _places(ours[key], theirs[key], starts[key[1]], order)
    ]
    evidence = first_steps(step_table(reference), step_table(candidate))
    return _failure(step, places, (len(differing), len(pairs)), evidence)


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
    return CheckResult(check=NAME, outcome="skipped", what=OTHER_PARTS, message=message)


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


def _failure(
    step: int, places: list[_Place], pairs: tuple[int, int], evidence: dict[str, int]
) -> CheckResult:
    num_differing, num_pairs = pairs
    first = min(places, key=lambda place: place.order)
    tensors = {(place.group, place.tensor) for place in places}
    ranks = {place.rank for place in places}
    return failed(
        NAME,
        "diverged",
        f"{first.tensor} ({first.group}) differs first {when(step)} on rank {first.rank}: "
        f"digest {first.reference} became {first.candidate}; in that step "
        f"{count(len(tensors), 'tensor')} on {show_ranks(ranks)} "
        f"{'differs' if len(tensors) == 1 else 'differ'}, in all "
        f"{num_differing} of {count(num_pairs, '(step, rank) pair')}; {sentence(evidence)}",
        Difference(
            step=step,
            rank=first.rank,
            quantity=first.group,
            tensor=first.tensor,
            reference=first.reference,
            candidate=first.candidate,
        ),
        differing_tensors=len(tensors),
        differing_ranks=len(ranks),
        differing_pairs=num_differing,
        **evidence,
    )


def _names_differ(reference: RunResult, candidate: RunResult) -> CheckResult | None:
    """A failure if a rank digests other tensors, or in another order, than its counterpart."""
    ours, theirs = rank_table(reference), rank_table(candidate)
    for rank, records in ours.items():
        other = theirs.get(rank)
        if records.start is None or other is None or other.start is None:
            continue
        for group in groups_of(records.start.tensors, other.start.tensors):
            left, right = records.start.tensors.get(group), other.start.tensors.get(group)
            if left == right:
                continue
            place, a, b = _first_unequal(left or (), right or ())
            return failed(
                NAME,
                "diverged",
                f"the runs digest different tensors: on rank {rank} tensor {place} of {group} "
                f"is {a or 'absent'} in the reference and {b or 'absent'} in the other run "
                f"({len(left or ())} against {len(right or ())} tensors)",
                Difference(
                    step=0, rank=rank, quantity=f"tensors.{group}", tensor=a or b,
                    reference=a, candidate=b,
                ),
            )  # fmt: skip
    return None


def _first_unequal(left: tuple[str, ...], right: tuple[str, ...]) -> tuple[int, str, str]:
    for place in range(max(len(left), len(right))):
        a = left[place] if place < len(left) else ""
        b = right[place] if place < len(right) else ""
        if a != b:
            return place, a, b
    return 0, "", ""


def _tensor_order(starts: dict[int, StartRecord]) -> dict[tuple[str, str], int]:
    """Place of each (group, tensor), over all ranks: ranks may hold different tensors."""
    names = dict.fromkeys(
        (group, name)
        for _, start in sorted(starts.items())
        for group in groups_of(start.tensors)
        for name in start.tensors[group]
    )
    return {name: place for place, name in enumerate(names)}


def _places(
    ours: StepRecord | InitialRecord,
    theirs: StepRecord | InitialRecord,
    start: StartRecord,
    order: dict[tuple[str, str], int],
) -> list[_Place]:
    places = []
    for index, group in enumerate(groups_of(ours.digests, theirs.digests)):
        left, right = ours.digests.get(group, ""), theirs.digests.get(group, "")
        if left == right:
            continue
        names = start.tensors.get(group, ())
        for place in range(max(len(left), len(right)) // DIGEST_HEX_CHARS + 1):
            window = slice(place * DIGEST_HEX_CHARS, (place + 1) * DIGEST_HEX_CHARS)
            if left[window] == right[window]:
                continue
            # A digest longer than its list of names belongs to an incomplete run; still say where.
            name = names[place] if place < len(names) else f"#{place}"
            places.append(
                _Place(
                    order=(index, order.get((group, name), 1 << 30), ours.rank),
                    group=group, tensor=name, rank=ours.rank,
                    reference=_shown(left[window]), candidate=_shown(right[window]),
                )
            )  # fmt: skip
    return places


def _shown(digest: str) -> str:
    return "missing" if digest in ("", ABSENT) else digest


def first_steps(ours: StepTable, theirs: StepTable) -> dict[str, int]:
    """First step that differs by each kind of evidence, `NEVER` if none does in shared steps."""
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


def sentence(steps: dict[str, int]) -> str:
    """What the loss alone would have shown, for people."""
    bits, decimals = steps["first_step_loss_bits"], steps["first_step_loss_5_decimals"]
    return f"the bits of the loss {_when(bits)}, its 5 decimals {_when(decimals)}"


def _when(step: int) -> str:
    return "never differ" if step == NEVER else f"differ first at step {step}"
