"""The finite check names the first NaN or infinity of the candidate."""

from typing import Any

import pytest

from harness.checks import exact
from harness.records import DIGEST_GROUPS, FloatBits

NAN = FloatBits.from_bits(0x7FC00000)
INF = FloatBits.from_bits(0xFF800000)


def test_finite_run_passes(lab: Any) -> None:
    """A run without NaN or infinity passes."""
    reference, _, candidate = lab.legs()
    assert exact.finite(reference, candidate).outcome == "passed"


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("quantity", ["loss", "microbatch_losses[1]", "grad_norm"])
def test_each_float_is_looked_at(lab: Any, edit: Any, value: FloatBits, quantity: str) -> None:
    """A NaN or infinity in any recorded float fails with its step, rank and name."""
    reference, _, candidate = lab.legs()
    if quantity.startswith("micro"):
        first = candidate.ranks[1].steps[2].microbatch_losses[0]
        changes: dict[str, Any] = {"microbatch_losses": (first, value)}
    else:
        changes = {quantity: value}
    answer = exact.finite(reference, edit.step(candidate, 1, 2, **changes))
    assert (answer.outcome, answer.what) == ("failed", "nonfinite")
    where = answer.difference
    assert where is not None
    assert (where.step, where.rank, where.quantity) == (2, 1, quantity)


@pytest.mark.parametrize("rank", [0, 7, 8, 15])
@pytest.mark.parametrize("group", [*DIGEST_GROUPS, "buffers"])
def test_each_group_of_each_of_16_ranks_is_looked_at(
    make_lab: Any, edit: Any, rank: int, group: str
) -> None:
    """A tensor of any group that is not finite fails, named with its group and rank."""
    reference, _, candidate = make_lab(world_size=16).legs()
    bad = edit.step(candidate, rank, 2, nonfinite={group: ("a tensor",)})
    answer = exact.finite(reference, bad)
    assert (answer.outcome, answer.what) == ("failed", "nonfinite")
    where = answer.difference
    assert where is not None
    assert (where.step, where.rank, where.quantity, where.tensor) == (2, rank, group, "a tensor")
    assert answer.figures["nonfinite_pairs"] == 1


def test_gradient_is_named_before_the_norm_made_of_it(lab: Any, edit: Any) -> None:
    """Where a gradient and the norm are bad the tensor is named, on whichever rank it is."""
    reference, _, candidate = lab.legs()
    candidate = edit.step(candidate, 0, 2, grad_norm=NAN)
    candidate = edit.step(
        candidate, 1, 2, grad_norm=NAN,
        nonfinite={"weights": ("embed.weight",), "grads": ("head.weight",)},
    )  # fmt: skip
    answer = exact.finite(reference, candidate)
    where = answer.difference
    assert where is not None
    found = (where.step, where.rank, where.quantity, where.tensor)
    assert found == (2, 1, "grads", "head.weight")
    assert "head.weight (grads)" in answer.message
    assert "the reference is finite there;" in answer.message


def test_poison_is_said_where_nan_comes_from_it(lab: Any, edit: Any) -> None:
    """Under that stressor, and only there, NaN means a buffer that was read out of its time."""
    reference, _, candidate = lab.legs()
    bad = edit.step(candidate, 1, 2, loss=NAN)
    plain = exact.finite(reference, bad).message
    bad.spec.config["stress"] = ["poison"]
    poisoned = exact.finite(reference, bad).message
    assert "poison" not in plain
    assert poisoned.startswith(plain)
    assert "under stressor poison NaN is what lies in a pool's buffer" in poisoned


def test_shared_nonfinite_still_fails(lab: Any, edit: Any) -> None:
    """A reference that is non-finite in the same place is mentioned and excuses nothing."""
    reference, _, candidate = lab.legs()
    answer = exact.finite(
        edit.step(reference, 0, 1, loss=NAN), edit.step(candidate, 0, 1, loss=NAN)
    )
    assert answer.outcome == "failed"
    assert "not finite there either" in answer.message


def test_unknown_group_of_tensors_counts(lab: Any, edit: Any) -> None:
    """A tensor listed under a group that the harness does not know still fails."""
    reference, _, candidate = lab.legs()
    answer = exact.finite(reference, edit.step(candidate, 0, 3, nonfinite={"novel": ("x",)}))
    assert answer.outcome == "failed"
    assert answer.difference is not None
    assert (answer.difference.quantity, answer.difference.tensor) == ("novel", "x")


def test_malformed_input(lab: Any, edit: Any) -> None:
    """No steps and a reference without records never pass and never raise."""
    reference, _, candidate = lab.legs()
    empty = edit.rank(edit.rank(candidate, 0, steps=()), 1, steps=())
    assert exact.finite(reference, empty).what == "not_run"
    answer = exact.finite(empty, edit.step(candidate, 0, 1, loss=NAN))
    assert answer.difference is not None
    assert answer.difference.reference == "missing"
