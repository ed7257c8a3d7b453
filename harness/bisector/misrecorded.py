"""Records that are wrong where the training was right.

State is made of the state before it, so it cannot go wrong for one step. A record that holds what
the step before left, in every tensor, while the next step begins as it should, was not written of
its own step: a buffer of records that was not filled again.
"""

from dataclasses import replace

from harness.bisector.found import Location
from harness.bisector.legs import Legs
from harness.checks.evidence import show_ranks
from harness.checks.exact import quantities
from harness.records import StepRecord


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
