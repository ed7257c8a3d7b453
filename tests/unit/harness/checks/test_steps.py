"""Tables of a run's records, and words that messages of checks are made of."""

import dataclasses
from typing import Any

import pytest

from harness.checks import loss
from harness.checks.steps import count, step_table


@pytest.mark.parametrize(
    ("number", "noun", "told"),
    [
        (1, "microbatch", "1 microbatch"),
        (2, "microbatch", "2 microbatches"),
        (0, "tensor", "0 tensors"),
        (3, "rank", "3 ranks"),
    ],
)
def test_a_number_of_things_is_plural_unless_one(number: int, noun: str, told: str) -> None:
    """Nouns that end in a hiss take -es."""
    assert count(number, noun) == told


def test_a_second_record_of_a_step_does_not_hide_the_first(lab: Any, edit: Any) -> None:
    """What was recorded first is compared: here it differs, and what follows it does not."""
    reference, _, candidate = lab.legs()
    right = candidate.ranks[0].steps[1]
    wrong = dataclasses.replace(right, loss=reference.ranks[1].steps[3].loss)
    steps = (candidate.ranks[0].steps[0], wrong, right, *candidate.ranks[0].steps[2:])
    twice = edit.rank(candidate, 0, steps=steps)
    assert step_table(twice)[1, 0] is wrong
    assert loss.check(reference, twice, {}).outcome == "failed"
