"""No NaN and no infinity in the candidate: losses, gradient norm, and the tensors of each group.

Within a step the order is that of the computation: losses, gradients, gradient norm, then what the
optimizer wrote. A reference that is non-finite in the same place does not excuse the candidate, but
for what is not trained: a buffer may be a mask of infinities. A step that the program skips for its
gradients may have such gradients, and a norm of them. An infinite loss is never excused: that of a
GradScaler is recorded before it is scaled.
"""

from collections.abc import Iterator, Mapping

from harness.checks.answer import error, failed, passed, refuse_parameters
from harness.checks.evidence import count, show_float, show_ranks, step_table
from harness.checks.exact import quantities
from harness.records import DIGEST_GROUPS, CheckResult, Difference, RunResult, StepRecord

NAME = "finite"
_Found = tuple[tuple[int, int], str, str, str]
"""Order, quantity, tensor, shown value."""
_POISONED = (
    "; under stressor poison NaN is what lies in a pool's buffer before it is written and after it "
    "is given back: look for who reads one then"
)


def check(
    reference: RunResult, candidate: RunResult, parameters: Mapping[str, object]
) -> CheckResult:
    """Look for the candidate's first non-finite quantity."""
    if (refusal := refuse_parameters(NAME, parameters)) is not None:
        return refusal
    theirs = step_table(candidate)
    if not theirs:
        return error(NAME, "not_run", "the candidate recorded no step: nothing to look at")
    beside = step_table(reference)
    bad = {
        key: places
        for key, record in theirs.items()
        if (places := list(_not_excused(record, beside.get(key))))
    }
    if not bad:
        return passed(
            NAME,
            f"every loss, gradient norm and tensor is finite in "
            f"{count(len(theirs), '(step, rank) pair')}",
            pairs=len(theirs),
        )
    step = min(bad)[0]
    _, rank, quantity, tensor, shown = min(
        (place, rank, quantity, tensor, shown)
        for (at, rank), places in bad.items()
        if at == step
        for place, quantity, tensor, shown in places
    )
    record = beside.get((step, rank))
    same = record is not None and any(
        (q, t) == (quantity, tensor) for _, q, t, _ in nonfinite(record)
    )
    ranks = {rank for at, rank in bad if at == step}
    named = f"{tensor} ({quantity})" if tensor else quantity
    tensors = sorted(p for (at, _), places in bad.items() if at == step for p in places if p[2])
    first_tensor = f"; first tensor {tensors[0][2]} ({tensors[0][1]})" if tensors else ""
    return failed(
        NAME,
        "nonfinite",
        f"{named} is not finite at step {step} on rank {rank}"
        f"{': ' + shown if shown else ''}; "
        + ("the reference is not finite there either" if same else "the reference is finite there")
        + ("" if tensor else first_tensor)
        + f"; {show_ranks(ranks)} affected in that step"
        + (_POISONED if "poison" in candidate.spec.config.get("stress", ()) else ""),
        Difference(
            step=step,
            rank=rank,
            quantity=quantity,
            tensor=tensor,
            reference=_shown_in(record, quantity, tensor),
            candidate=shown or "non-finite",
        ),
        nonfinite_pairs=len(bad),
    )


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
    if record is None:
        return "missing"
    if tensor:
        return "non-finite" if tensor in record.nonfinite.get(quantity, ()) else "finite"
    value = dict(quantities(record)).get(quantity)
    return "missing" if value is None else show_float(value)
