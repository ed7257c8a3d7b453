"""Tables of a run's records, and words that messages of checks are made of."""

import dataclasses
from typing import Any

import pytest

from harness.checks import exact
from harness.checks.evidence import BEFORE, count, rank_table, shared_pairs, state_table, step_table


def test_tables_hold_every_rank_and_step(make_lab: Any) -> None:
    """Of 16 ranks each, in the order of steps and then ranks, the state before step 0 first."""
    lab = make_lab(world_size=16)
    run, _, other = lab.legs()
    steps = [(step, rank) for step in range(lab.steps) for rank in range(16)]
    states = [(BEFORE, rank) for rank in range(16)]
    assert list(step_table(run)) == steps
    assert list(state_table(run)) == states + steps
    assert shared_pairs(state_table(run), state_table(other)) == states + steps
    assert list(rank_table(run)) == list(range(16))
    for (step, rank), record in step_table(run).items():
        assert record is run.ranks[rank].steps[step]
    for _, rank in states:
        assert state_table(run)[BEFORE, rank] is run.ranks[rank].initial


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
    assert exact.loss(reference, twice).outcome == "failed"
