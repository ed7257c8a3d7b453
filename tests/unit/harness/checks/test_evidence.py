"""What weaker evidence would have shown, and when."""

import dataclasses
import struct
from typing import Any

from harness.checks import exact
from harness.checks.evidence import step_table
from harness.checks.exact import NEVER, first_steps
from harness.records import FloatBits


def _bits(number: float) -> FloatBits:
    return FloatBits.from_bits(int.from_bytes(struct.pack(">f", number), "big"))


def test_state_alone_sees_it(lab: Any, edit: Any) -> None:
    """A digest that differs while every loss agrees is seen by the state and never by the loss."""
    reference, candidate = lab.run(lab.spec()), lab.run(lab.spec())
    record = candidate.ranks[1].steps[2]
    digest = ("0" if record.digests["weights"][0] != "0" else "1") + record.digests["weights"][1:]
    candidate = edit.step(candidate, 1, 2, digests=record.digests | {"weights": digest})
    result = exact.state(reference, candidate)
    assert result.figures["first_step_state"] == 2
    assert result.figures["first_step_loss_bits"] == NEVER
    assert "the bits of the loss never differ" in result.message


def test_decimals_see_less_than_bits(lab: Any, edit: Any) -> None:
    """One ulp of the loss shows in its bits at once and at five decimals only once it has grown."""
    reference = lab.run(lab.spec())
    candidate = edit.step(reference, 0, 1, loss=_bits(2.0000002384185791))
    candidate = edit.step(candidate, 0, 3, loss=_bits(2.5))
    reference = edit.step(edit.step(reference, 0, 1, loss=_bits(2.0)), 0, 3, loss=_bits(2.0))
    steps = first_steps(step_table(reference), step_table(candidate))
    assert (steps["first_step_loss_bits"], steps["first_step_loss_5_decimals"]) == (1, 3)


def test_lost_records_are_not_evidence(lab: Any) -> None:
    """Only steps that both runs hold are compared."""
    run = lab.run(lab.spec())
    shorter = dataclasses.replace(run, ranks=run.ranks[:1])
    assert set(first_steps(step_table(run), step_table(shorter)).values()) == {NEVER}
