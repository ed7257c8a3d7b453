"""Losses and gradient norms, bit for bit, per step and rank.

Bits are compared, never values: NaN equals only the same NaN, and -0.0 is not 0.0. The first
difference is the lowest step; within it a loss comes before the gradient norm, then the lowest
rank.
"""

from collections.abc import Iterator, Mapping

from harness.checks.answer import error, failed, passed, refuse_parameters
from harness.checks.evidence import (
    StepTable,
    count,
    shared_pairs,
    show_float,
    show_ranks,
    step_table,
)
from harness.records import CheckResult, Difference, FloatBits, RunResult, StepRecord, ulp_distance

NAME = "loss"


def check(
    reference: RunResult, candidate: RunResult, parameters: Mapping[str, object]
) -> CheckResult:
    """Compare every loss, microbatch loss and gradient norm of the pairs that both runs hold."""
    if (refusal := refuse_parameters(NAME, parameters)) is not None:
        return refusal
    ours, theirs = step_table(reference), step_table(candidate)
    pairs = shared_pairs(ours, theirs)
    if not pairs:
        return error(NAME, "not_run", "the runs share no step of any rank: nothing to compare")
    if not any(_bits(record) for table in (ours, theirs) for record in table.values()):
        return error(NAME, "not_run", "neither run recorded a loss or a norm: nothing to compare")
    differing = [key for key in pairs if _bits(ours[key]) != _bits(theirs[key])]
    if not differing:
        return passed(
            NAME,
            f"loss, microbatch losses and gradient norm equal bit for bit in "
            f"{count(len(pairs), '(step, rank) pair')}",
            pairs=len(pairs),
            differing_pairs=0,
        )
    first = _first(ours, theirs, differing)
    distance = "" if first.ulps is None else f", {count(first.ulps, 'ulp')} apart"
    if first.ulps == 0:
        distance = ", the sign of a zero"
    return failed(
        NAME,
        "diverged",
        f"{first.quantity} differs first at step {first.step} on rank {first.rank}: "
        f"{first.reference} became {first.candidate}{distance}; "
        f"{len(differing)} of {count(len(pairs), '(step, rank) pair')} "
        f"{'differs' if len(differing) == 1 else 'differ'}, "
        f"on {show_ranks({rank for _, rank in differing})}",
        first,
        pairs=len(pairs),
        differing_pairs=len(differing),
    )


def quantities(record: StepRecord) -> Iterator[tuple[str, FloatBits]]:
    """Every compared float of a step, named, in the order in which a difference is looked for."""
    if record.loss is not None:
        yield "loss", record.loss
    for index, loss in enumerate(record.microbatch_losses):
        yield f"microbatch_losses[{index}]", loss
    if record.grad_norm is not None:
        yield "grad_norm", record.grad_norm


def _bits(record: StepRecord) -> tuple[tuple[str, str], ...]:
    # The count of microbatches is part of the tuple's length, so a lost one differs too.
    return tuple((name, value.bits) for name, value in quantities(record))


def _first(ours: StepTable, theirs: StepTable, differing: list[tuple[int, int]]) -> Difference:
    step = differing[0][0]
    places: list[tuple[int, int, str, FloatBits | None, FloatBits | None]] = []
    for _, rank in (key for key in differing if key[0] == step):
        a, b = dict(quantities(ours[step, rank])), dict(quantities(theirs[step, rank]))
        for name in a | b:
            left, right = a.get(name), b.get(name)
            if left is None or right is None or left.bits != right.bits:
                places.append((_place(name), rank, name, left, right))
    _, rank, name, left, right = min(places, key=lambda place: place[:2])
    return Difference(
        step=step,
        rank=rank,
        quantity=name,
        reference="missing" if left is None else show_float(left),
        candidate="missing" if right is None else show_float(right),
        ulps=None if left is None or right is None else ulp_distance(left, right),
    )


def _place(name: str) -> int:
    if name == "loss":
        return 0
    if name == "grad_norm":
        return 1 << 30
    return 1 + int(name.removeprefix("microbatch_losses[").removesuffix("]"))
