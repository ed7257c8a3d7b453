"""Whatever is seen on two ranks is seen on the last of twelve: no table stops at eight."""

import dataclasses
from typing import Any

import pytest

from harness.checks import exact
from harness.checks.complete import find_flaw
from harness.checks.judge import judge
from harness.records import FloatBits

RANKS = 12
LAST = RANKS - 1


@pytest.fixture(scope="module")
def wide(make_lab: Any) -> Any:
    return make_lab(steps=3, world_size=RANKS)


@pytest.mark.parametrize("rank", [8, LAST])
def test_a_difference_is_seen_on_any_rank(wide: Any, edit: Any, rank: int) -> None:
    """A digest, a loss and an infinity of a rank above 7."""
    reference, control, candidate = wide.legs()
    digest = edit.digest(candidate, rank, 2, "optim", 3)
    other = edit.step(candidate, rank, 2, grad_norm=FloatBits.from_bits(0x7F800000))
    for check, run in ((exact.state, digest), (exact.loss, other), (exact.finite, other)):
        answer = check(reference, run)
        assert answer.outcome == "failed"
        assert answer.difference is not None
        assert (answer.difference.step, answer.difference.rank) == (2, rank)
    for run in (digest, other):
        assert judge(wide.case(), reference, control, run).outcome == "failed"


def test_names_are_compared_on_any_rank(wide: Any, edit: Any) -> None:
    """Tensors of the last rank alone have other names."""
    reference, _, candidate = wide.legs()
    start = candidate.ranks[LAST].start
    tensors = start.tensors | {"weights": start.tensors["weights"][::-1]}
    renamed = edit.rank(candidate, LAST, start=dataclasses.replace(start, tensors=tensors))
    answer = exact.state(reference, renamed)
    assert answer.difference is not None
    assert answer.difference.rank == LAST


def test_a_rank_that_recorded_nothing_is_missing(wide: Any, edit: Any) -> None:
    """Its records are gone, though its process ended well; so is only its last step."""
    _, _, candidate = wide.legs()
    gone = dataclasses.replace(candidate, ranks=candidate.ranks[:LAST])
    silent = edit.rank(candidate, LAST, start=None, steps=(), end=None)
    for run in (gone, silent):
        flaw = find_flaw(run)
        assert flaw is not None
        assert (flaw.what, flaw.rank) == ("missing_rank", LAST)
    steps = candidate.ranks[LAST].steps
    flaw = find_flaw(edit.rank(candidate, LAST, steps=steps[:-1]))
    assert flaw is not None
    assert (flaw.what, flaw.rank, flaw.step) == ("missing_step", LAST, 2)
