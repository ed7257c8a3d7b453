"""The step in which two layouts are compared: the first that is apart, and how it is known."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from harness.bisect import layouts
from harness.bisect.experiments import OutOfBudget
from harness.bisect.found import Location
from harness.bisect.layouts import Apart, Compared, LayoutAnswer, Units, first_apart
from harness.records import Verdict

Search = Callable[..., Compared]


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> tuple[Search, list[int], list[int | None]]:
    """Searches a made-up fault; the steps that were compared, and those told of as apart."""
    asked: list[int] = []
    seen: list[int | None] = []

    def carry_out(steps: range, is_apart: Callable[[int], bool], *broken: int) -> Compared:
        def compare(case: Any, step: int, asker: Any) -> Compared:
            asked.append(step)
            if step in broken:
                return compared("error", (), None, f"step {step} crashed")
            place = Location(step=step, evidence=(f"apart in {step}",)) if is_apart(step) else None
            some = (Apart(name="loss", units=Units(0.5, 0.5, 0.5)),)
            return compared("failed" if place else "passed", some, place, f"looked at {step}")

        monkeypatch.setattr(layouts, "_compare", compare)
        none = cast("Any", None)
        return first_apart(none, steps, none, seen=lambda c: seen.append(step_of(c)))

    return carry_out, asked, seen


def compared(outcome: Any, tensors: Any, place: Location | None, message: str) -> Compared:
    """An answer about one step."""
    verdict = Verdict(
        case_id="c", outcome=outcome, what="", message=message, checks=(), runs={}, wall_s=0.0
    )
    return Compared(
        answer=LayoutAnswer(location=place, tensors=tensors, message=message), verdict=verdict
    )


def step_of(found: Compared) -> int | None:
    """Where they are apart."""
    return None if found.answer.location is None else found.answer.location.step


def test_what_is_wrong_from_the_beginning_is_found_at_once(search: Any) -> None:
    """One step is compared, however many there are."""
    carry_out, asked, seen = search
    assert step_of(carry_out(range(100), lambda _: True)) == 0
    assert asked == seen == [0]


@pytest.mark.parametrize("begin", range(1, 9))
def test_the_first_step_that_is_apart_is_found(search: Any, begin: int) -> None:
    """Not the last, where it has spread; the step before was seen to be right, and says so."""
    carry_out, asked, seen = search
    found = carry_out(range(9), lambda step: step >= begin)
    assert step_of(found) == begin
    assert found.answer.location.evidence == (f"looked at {begin - 1}", f"apart in {begin}")
    assert asked[:2] == [0, 8]
    assert len(set(asked)) == len(asked) <= 6
    # Whoever stops the search has the nearest one.
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == begin


def test_two_layouts_that_agree_were_looked_at_in_two_steps(search: Any) -> None:
    """The first and the last, and the answer says of both; a step that is named, in that alone."""
    carry_out, asked, _ = search
    found = carry_out(range(9), lambda _: False)
    assert (found.verdict.outcome, asked) == ("passed", [0, 8])
    assert found.verdict.message == "looked at 8; before, looked at 0"
    asked.clear()
    assert carry_out(range(4, 5), lambda _: False).verdict.message == "looked at 4"
    assert asked == [4]


def test_a_step_that_cannot_be_compared_is_no_agreement(search: Any) -> None:
    """The first or the last: no verdict; one between: said beside the answer."""
    carry_out, _, _ = search
    assert carry_out(range(9), lambda _: True, 0).verdict.outcome == "error"
    assert carry_out(range(9), lambda _: False, 8).verdict.outcome == "error"
    place = carry_out(range(4), lambda step: step == 3, 2).answer.location
    assert (place.step, place.unknown) == (3, ("the step before: step 2 crashed",))


def test_a_budget_that_ends_leaves_what_was_seen(search: Any) -> None:
    """The last step is known to be apart, whoever stops the search then."""
    carry_out, _, seen = search

    def is_apart(step: int) -> bool:
        if step not in (0, 8):
            raise OutOfBudget("enough")
        return step == 8

    with pytest.raises(OutOfBudget):
        carry_out(range(9), is_apart)
    assert seen == [8]
