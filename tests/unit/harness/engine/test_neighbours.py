"""Whose end may be another run's doing: told by who was beside whom, and when they failed."""

from typing import Any

import pytest

from harness.engine.gpus import NOTICE_S, End, Neighbours
from harness.records import What


def end(key: str, at_s: float, what: What = "illegal_access", **more: Any) -> End:
    """An end that was seen at once."""
    return End(key=key, what=what, **({"first_s": at_s, "last_s": at_s} | more))


def beside(*ends: End, gpus: dict[str, tuple[str, ...]] | None = None) -> Neighbours:
    """Runs that were all under way at the same time, on GPU 0 unless it says otherwise."""
    found = Neighbours()
    for each in ends:
        found.started(each.key, (gpus or {}).get(each.key, ("0",)))
    for each in ends:
        found.left(each.key)
        found.ended(each)
    return found


def test_runs_of_one_gpu_that_fail_together_are_in_question() -> None:
    """Nobody can say from outside which of them was first on the device."""
    found = beside(end("a", 10.0), end("b", 12.0)).decide()
    assert (found.stand, found.asked) == ((), {"a": ("b",), "b": ("a",)})


def test_whoever_shares_no_gpu_stands() -> None:
    """A fault ends those on its own GPU, and no others."""
    found = beside(end("a", 10.0), end("b", 10.0), gpus={"b": ("1",)})
    assert not found.had_company("a")
    assert found.decide().stand == ("a", "b")


def test_what_is_tied_to_a_victim_is_in_its_group() -> None:
    """Who was killed by the end of one that was killed may owe it to the first of them."""
    gpus = {"a": ("0",), "b": ("0", "1"), "c": ("1",)}
    found = beside(end("a", 10.0), end("b", 10.0), end("c", 10.0), gpus=gpus).decide()
    assert {key: set(tied) for key, tied in found.asked.items()} == {
        "a": {"b", "c"}, "b": {"a", "c"}, "c": {"a", "b"},
    }  # fmt: skip


@pytest.mark.parametrize(("later_s", "tied"), [(NOTICE_S, True), (NOTICE_S + 1.0, False)])
def test_a_run_that_lives_on_ends_by_itself(later_s: float, tied: bool) -> None:
    """A rank sees that its GPU is lost within the window, or it was not lost to it."""
    found = beside(end("a", 10.0), end("b", 10.0 + later_s)).decide()
    assert bool(found.asked) is tied
    assert found.stand == (() if tied else ("a", "b"))


def test_a_hang_began_with_its_last_sign_of_life() -> None:
    """Its time limit ends it long after its neighbour, but it has done nothing since."""
    hung = end("b", 500.0, "hang", first_s=8.0)
    assert beside(end("a", 10.0, own=True), hung).decide().asked == {"b": ("a",)}
    alive = end("b", 500.0, "hang", first_s=400.0)
    assert beside(end("a", 10.0, own=True), alive).decide().asked == {"b": ()}


@pytest.mark.parametrize(("first_s", "stands"), [(10.0, ("a",)), (5.0, ())])
def test_an_error_of_the_program_is_certain_before_all_others(
    first_s: float, stands: tuple[str, ...]
) -> None:
    """What a rank raises after the device has failed elsewhere may follow from that."""
    found = beside(end("a", 10.0, "crashed", own=True), end("b", first_s)).decide()
    assert found.stand == stands
    assert found.asked["b"] == ("a",)


@pytest.mark.parametrize(("what", "asked"), [("hang", True), ("oom", True), ("crashed", False)])
def test_what_company_alone_can_bring_about_is_in_question(what: What, asked: bool) -> None:
    """A hang or a lack of memory beside runs that ended well is not the run's own for certain."""
    found = Neighbours()
    found.started("a", ("0",))
    found.started("well", ("0",))
    found.left("well")
    found.left("a")
    found.ended(end("a", 10.0, what))
    assert found.decide().asked == ({"a": ()} if asked else {})


def test_what_became_of_a_lost_neighbour_is_not_known() -> None:
    """It may have been the culprit or not, and explains nothing."""
    found = beside(end("a", 10.0), end("b", 10.0, "interrupted")).decide()
    assert (found.stand, found.asked) == (("b",), {"a": ()})


def test_ends_are_waited_for_as_long_as_they_may_be_tied() -> None:
    """Until no run that was beside it is left, or they have lived on for the window."""
    found = Neighbours()
    for key in ("a", "b", "far"):
        found.started(key, ("1" if key == "far" else "0",))
    assert found.due_s(0.0) is None
    found.left("a")
    found.ended(end("a", 10.0))
    assert found.due_s(10.0) == 10.0 + NOTICE_S
    assert found.due_s(10.0 + NOTICE_S) is None
    found.left("b")
    assert found.due_s(10.0) is None, "a run of another GPU is waited for"


def test_a_run_that_began_later_was_not_beside_it() -> None:
    """Only those are tied that were under way at the same time."""
    found = Neighbours()
    found.started("a", ("0",))
    found.left("a")
    found.ended(end("a", 10.0))
    found.started("b", ("0",))
    assert not found.had_company("b")
    assert found.due_s(10.0) is None
