"""Timed repeats are the runs that they repeat: each of them, in bits, environment and order."""

import dataclasses
from typing import Any

import pytest

from harness.checks.evidence import Runs
from harness.checks.speed import same_bits
from harness.records import FloatBits
from harness.repeats import timed_pairs


def check(lab: Any, case: Any, repeats: list[Any]) -> Any:
    run = lab.run(case.reference)
    return same_bits(Runs(case=case, reference=run, control=run, candidate=run, repeats=repeats))


@pytest.fixture
def case(lab: Any) -> Any:
    return lab.case(repeats=2)


@pytest.fixture
def repeats(lab: Any, case: Any) -> list[Any]:
    return [lab.run(spec) for pair in timed_pairs(case) for spec in pair]


def test_equal_repeats_pass(lab: Any, case: Any, repeats: list[Any]) -> None:
    """Two pairs with the bits of the reference."""
    assert check(lab, case, repeats).outcome == "passed"


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("what", ["loss", "state"])
def test_any_repeat_may_differ(
    lab: Any, edit: Any, case: Any, repeats: list[Any], place: int, what: str
) -> None:
    """A candidate's has failed; one of the reference makes the reference nondeterministic."""
    run = repeats[place]
    repeats[place] = (
        edit.step(run, 1, 3, grad_norm=FloatBits.from_bits(0x3F123456))
        if what == "loss" else edit.digest(run, 1, 3, "optim", 5)
    )  # fmt: skip
    answer = check(lab, case, repeats)
    expected = ("failed", "diverged") if place % 2 else (
        "incomparable", "nondeterministic_reference"
    )  # fmt: skip
    assert (answer.outcome, answer.what) == expected
    assert answer.difference is not None
    assert (answer.difference.step, answer.difference.rank) == (3, 1)


def test_a_repeat_in_another_environment(
    lab: Any, edit: Any, case: Any, repeats: list[Any]
) -> None:
    """Equal bits of another environment are no repeat."""
    start = dataclasses.replace(repeats[3].ranks[0].start, environment={"torch": "2.13"})
    repeats[3] = edit.rank(repeats[3], 0, start=start)
    answer = check(lab, case, repeats)
    assert (answer.outcome, answer.what) == ("incomparable", "different_environment")


def test_repeats_of_another_case_or_too_few(lab: Any, case: Any, repeats: list[Any]) -> None:
    """They are known by their keys, in the order of the plan."""
    for wrong in (repeats[:2], repeats[::-1], [lab.run(case.reference)] * 4, []):
        answer = check(lab, case, wrong)
        assert (answer.outcome, answer.what) == ("error", "corrupt_record")
