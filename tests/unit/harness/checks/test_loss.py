"""The loss check sees every bit of every loss and norm, and says where it first differs."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checks import exact
from harness.records import FloatBits


def flipped(value: FloatBits, bit: int) -> FloatBits:
    return FloatBits.from_bits(int(value.bits, 16) ^ (1 << bit))


def test_equal_runs_pass(lab: Any) -> None:
    """Equal bits pass, and the answer says over how many pairs."""
    reference, _, candidate = lab.legs()
    answer = exact.loss(reference, candidate)
    assert answer.outcome == "passed"
    assert answer.figures["pairs"] == lab.steps * lab.world_size


@pytest.mark.parametrize(
    ("left", "right", "ulps"),
    [
        (0x3F800000, 0x3F800001, 1),
        (0x00000000, 0x80000000, 0),
        (0x7FC00000, 0x7FC00001, None),
        (0x7F800000, 0x7F7FFFFF, None),
        (0x80000001, 0x00000001, 2),
    ],
)
def test_bits_decide(lab: Any, edit: Any, left: int, right: int, ulps: int | None) -> None:
    """One ulp, -0.0 for 0.0, another NaN payload and infinity for the largest float all differ."""
    reference, _, candidate = lab.legs()
    a, b = FloatBits.from_bits(left), FloatBits.from_bits(right)
    reference = edit.step(reference, 1, 2, grad_norm=a)
    answer = exact.loss(reference, edit.step(candidate, 1, 2, grad_norm=b))
    assert answer.outcome == "failed"
    assert answer.difference is not None
    assert (answer.difference.step, answer.difference.rank) == (2, 1)
    assert answer.difference.ulps == ulps
    assert f"0x{a.bits}" in answer.difference.reference
    assert f"0x{b.bits}" in answer.difference.candidate
    same = exact.loss(reference, edit.step(candidate, 1, 2, grad_norm=a))
    assert same.outcome == "passed"


def test_loss_before_norm_then_rank(lab: Any, edit: Any) -> None:
    """Within a step a loss of a later rank comes before the norm of an earlier one."""
    reference, _, candidate = lab.legs()
    step = candidate.ranks[0].steps[2]
    candidate = edit.step(candidate, 0, 2, grad_norm=flipped(step.grad_norm, 0))
    candidate = edit.step(candidate, 1, 2, loss=flipped(candidate.ranks[1].steps[2].loss, 0))
    candidate = edit.step(candidate, 0, 3, loss=flipped(candidate.ranks[0].steps[3].loss, 0))
    answer = exact.loss(reference, candidate)
    assert answer.difference is not None
    where = answer.difference
    assert (where.step, where.rank, where.quantity, where.ulps) == (2, 1, "loss", 1)
    assert "3 of 8 (step, rank) pairs differ, on ranks 0 and 1" in answer.message


def test_microbatch_losses_that_cancel(lab: Any, edit: Any) -> None:
    """Microbatch losses that changed places are seen although their mean is the same."""
    reference, _, candidate = lab.legs()
    losses = candidate.ranks[0].steps[1].microbatch_losses
    candidate = edit.step(candidate, 0, 1, microbatch_losses=losses[::-1])
    answer = exact.loss(reference, candidate)
    assert answer.difference is not None
    assert answer.difference.quantity == "microbatch_losses[0]"


def test_malformed_input(lab: Any, edit: Any) -> None:
    """Nothing in common and a lost microbatch never pass nor raise."""
    reference, _, candidate = lab.legs()
    for rank in (0, 1):
        candidate = edit.rank(candidate, rank, steps=())
    assert exact.loss(reference, candidate).what == "not_run"
    short = edit.step(reference, 0, 1, microbatch_losses=())
    for left, right in ((reference, short), (short, reference)):
        answer = exact.loss(left, right)
        assert answer.outcome == "failed"
        assert answer.difference is not None
        assert "missing" in (answer.difference.reference, answer.difference.candidate)


def test_a_norm_that_only_one_run_has_differs(lab: Any, edit: Any) -> None:
    """The last of a step's values may be missing in either run."""
    reference, _, candidate = lab.legs()
    bare = edit.step(candidate, 1, 3, grad_norm=None)
    for left, right in ((reference, bare), (bare, reference)):
        answer = exact.loss(left, right)
        assert answer.outcome == "failed"
        assert answer.difference is not None
        assert (answer.difference.quantity, answer.difference.step) == ("grad_norm", 3)


def test_runs_without_any_loss_compare_nothing(lab: Any, edit: Any) -> None:
    """Programs may record none: then there is no answer, and no pass."""
    runs = list(lab.legs())
    for place, run in enumerate(runs):
        for rank in range(lab.world_size):
            for step in range(lab.steps):
                run = edit.step(run, rank, step, loss=None, microbatch_losses=(), grad_norm=None)
        runs[place] = run
    answer = exact.loss(runs[0], runs[2])
    assert (answer.outcome, answer.what) == ("error", "not_run")


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found_where_it_is(lab: Any, edit: Any, data: st.DataObject) -> None:
    """Flipping any bit of any loss or norm fails with exactly that step, rank and quantity."""
    reference, _, candidate = lab.legs()
    rank = data.draw(st.integers(0, lab.world_size - 1))
    step = data.draw(st.integers(0, lab.steps - 1))
    bit = data.draw(st.integers(0, 31))
    quantity: Any = data.draw(st.sampled_from(["loss", "grad_norm", 0, 1]))
    record = candidate.ranks[rank].steps[step]
    if isinstance(quantity, int):
        losses = list(record.microbatch_losses)
        losses[quantity] = flipped(losses[quantity], bit)
        changes: dict[str, Any] = {"microbatch_losses": tuple(losses)}
        name = f"microbatch_losses[{quantity}]"
    else:
        name = quantity
        changes = {name: flipped(getattr(record, name), bit)}
    answer = exact.loss(reference, edit.step(candidate, rank, step, **changes))
    assert answer.outcome == "failed"
    where = answer.difference
    assert where is not None
    assert (where.step, where.rank, where.quantity) == (step, rank, name)
