"""Contracts of harness.bisect.causes: what it names fails, and no part of it is idle."""

import math
import random
from collections.abc import Callable, Iterable
from itertools import chain, combinations

import pytest

from harness.bisect.causes import Cause, Minimiser
from harness.bisect.chance import FAILS, PASSES, UNRESOLVED, Answer, NeverFails
from harness.bisect.experiments import OutOfBudget

Changes = frozenset[str]
NONE: Changes = frozenset()


def names(number: int) -> list[str]:
    return [f"c{n}" for n in range(number)]


def sets(*words: str) -> list[Changes]:
    """`sets("ab", "c")`: {a, b} and {c}."""
    return [frozenset(word) for word in words]


def failing(causes: Iterable[Changes]) -> Callable[[Changes], Answer]:
    """What fails once all changes of a cause are there."""
    known = list(causes)
    return lambda changes: FAILS if any(cause <= changes for cause in known) else PASSES


def subsets(changes: Iterable[str]) -> list[Changes]:
    whole = list(changes)
    return [
        frozenset(s)
        for s in chain.from_iterable(combinations(whole, n) for n in range(len(whole) + 1))
    ]


def smallest(found: Iterable[Changes]) -> set[Changes]:
    """Without those that have another inside."""
    whole = set(found)
    return {s for s in whole if not any(other < s for other in whole)}


def found_by(minimiser: Minimiser) -> set[Changes]:
    return {frozenset(cause.changes) for cause in minimiser.causes(limit=50).causes}


@pytest.mark.parametrize("seed", range(60))
def test_all_causes_are_found(seed: int) -> None:
    """Of causes drawn at random, single ones and conjunctions, exactly the minimal ones, all."""
    drawn = random.Random(seed)
    changes = names(drawn.randint(1, 9))
    causes = [
        frozenset(drawn.sample(changes, min(drawn.randint(1, 3), len(changes))))
        for _ in range(drawn.randint(1, 3))
    ]
    asked: list[Changes] = []

    def test(tried: Changes) -> Answer:
        asked.append(tried)
        return failing(causes)(tried)

    minimiser = Minimiser(changes, test)
    found = minimiser.causes()
    assert {frozenset(c.changes) for c in found.causes} == smallest(causes)
    assert (found.complete, found.contradictions, found.notes) == (True, (), ())
    assert all(not c.unproven for c in found.causes)
    assert len(asked) == len(set(asked)) == found.num_questions
    assert found.candidates == len(changes)


def test_one_cause_takes_the_logarithm() -> None:
    """Where all and none are known: halvings, the change alone, and whether anything else fails."""
    changes = names(64)
    known: dict[Changes, Answer] = {frozenset(changes): FAILS, NONE: PASSES}
    for change in changes:
        minimiser = Minimiser(changes, failing([frozenset([change])]), known=known)
        assert minimiser.causes().causes == (Cause(changes=(change,)),)
        assert minimiser.num_questions <= math.log2(64) + 2


@pytest.mark.parametrize("seed", range(60))
def test_holes_are_stepped_over(seed: int) -> None:
    """Whatever is illegal is never asked; what is named fails, and cannot be made smaller."""
    drawn = random.Random(seed)
    changes = names(7)
    causes = [frozenset(drawn.sample(changes, drawn.randint(1, 2))) for _ in range(2)]
    # A change that needs another; two that exclude each other are in the full set, so cannot be.
    needs = {
        change: drawn.choice(changes[:place])
        for place, change in enumerate(changes)
        if place and drawn.random() < 0.4
    }
    odds = 0.2 * (seed % 2)
    holes = {s for s in subsets(changes) if 0 < len(s) < 7 and drawn.random() < odds}

    def legal(tried: Changes) -> bool:
        return all(needs[c] in tried for c in tried if c in needs)

    def test(tried: Changes) -> Answer:
        assert legal(tried)
        return UNRESOLVED if tried in holes else failing(causes)(tried)

    def answer(tried: Changes) -> Answer:
        return test(tried) if legal(tried) else UNRESOLVED

    minimiser = Minimiser(changes, test, legal=legal)
    found = minimiser.causes()
    assert found.causes
    for cause in found.causes:
        named = frozenset(cause.changes)
        assert answer(named) == FAILS
        # Illegal ones cost nothing, so no subset of a small set that lacks more fails either.
        without = {c: answer(named - {c}) for c in named}
        assert FAILS not in without.values()
        assert {c for c, said in without.items() if said == UNRESOLVED} == set(cause.unproven)
    whole = {s for s in subsets(changes) if answer(s) == FAILS}
    if not holes:
        assert found.complete
        assert {frozenset(c.changes) for c in found.causes} == smallest(whole)


def test_a_change_that_cannot_be_left_out_is_marked() -> None:
    """The fault is in b, which cannot run without a: both are named, a as unproven."""
    minimiser = Minimiser(
        "abcd", failing(sets("b")), legal=lambda tried: "b" not in tried or "a" in tried
    )
    found = minimiser.causes()
    assert found.causes == (Cause(changes=("a", "b"), unproven=("a",)),)
    assert found.complete


def test_changes_that_go_together_leave_together() -> None:
    """a and b are legal only with each other: neither is dragged along with c and d."""
    minimiser = Minimiser(
        "acbd", failing(sets("cd")), legal=lambda tried: ("a" in tried) == ("b" in tried)
    )
    assert found_by(minimiser) == {frozenset("cd")}


def test_an_illegal_rest_is_asked_in_part() -> None:
    """Without a, c is illegal too: a second cause is looked for without both, and found."""
    minimiser = Minimiser(
        "abcd", failing(sets("a", "d")), legal=lambda tried: "c" not in tried or "a" in tried
    )
    assert found_by(minimiser) == set(sets("a", "d"))


def test_halves_are_tried_where_no_prefix_runs() -> None:
    """Every prefix crashes, so nothing is told apart: not each change is left out one by one."""
    changes = names(32)
    prefixes = {frozenset(changes[:n]) for n in range(1, 32)}

    def test(tried: Changes) -> Answer:
        return UNRESOLVED if tried in prefixes else failing([frozenset(["c20"])])(tried)

    minimiser = Minimiser(changes, test)
    assert minimiser.minimal() == Cause(changes=("c20",))
    assert minimiser.num_questions < 31 + 32


def test_what_ends_a_branch_ends_all_below_it() -> None:
    """Nothing fails without a, so nothing need be asked of what lacks a and more."""
    asked: list[Changes] = []

    def test(tried: Changes) -> Answer:
        asked.append(tried)
        return failing(sets("ab", "ac"))(tried)

    assert found_by(Minimiser("abcd", test)) == set(sets("ab", "ac"))
    assert frozenset("bcd") in asked
    assert not {frozenset("cd"), frozenset("bd")} & set(asked)


@pytest.mark.parametrize(("number", "complete"), [(6, False), (13, True), (14, False)])
def test_the_legal_parts_of_a_rest_are_all_asked_or_it_is_said(number: int, complete: bool) -> None:
    """More parts than are asked, or than are looked for: there may be another cause."""
    changes = names(number)
    alone = number == 6  # each of the five others is legal alone; or nothing is without the first

    def legal(tried: Changes) -> bool:
        return changes[0] in tried or len(tried) <= alone

    minimiser = Minimiser(changes, failing([frozenset(changes[:1])]), legal=legal)
    assert minimiser.causes().complete == complete


def test_what_cannot_be_asked_is_said() -> None:
    """No two run together without a, and some crash: whether they fail stays open."""
    minimiser = Minimiser(
        "abc",
        lambda tried: UNRESOLVED if tried == frozenset("c") else failing(sets("a"))(tried),
        legal=lambda tried: len(tried) < 2 or "a" in tried,
    )
    found = minimiser.causes()
    assert not found.complete
    assert any("without a the other changes are illegal together" in note for note in found.notes)


def test_what_fails_otherwise_is_said() -> None:
    """Without a the run crashes: no answer, no pass."""
    found = Minimiser(
        "abc", lambda tried: FAILS if "a" in tried else UNRESOLVED, known={NONE: PASSES}
    ).causes()
    assert [str(c) for c in found.causes] == ["a"]
    assert not found.complete
    assert found.notes == ("without a it cannot be run, or fails otherwise",)


def test_answers_that_are_not_monotone_are_told() -> None:
    """c hides the fault of a and b: what is named fails, and the pair that shows it is told."""

    def test(tried: Changes) -> Answer:
        return FAILS if tried in sets("ab", "abz", "abcz") else PASSES

    found = Minimiser("abcz", test).causes()
    assert {frozenset(c.changes) for c in found.causes} == {frozenset("ab")}
    hidden = Minimiser("abcz", test, known={frozenset("abc"): PASSES}).causes()
    assert hidden.contradictions == ("a + b fails, and passes once c is added",)


def test_base_that_fails() -> None:
    """If it fails with none of the changes, none is blamed."""
    found = Minimiser("ab", lambda _: FAILS).causes()
    assert found.causes == (Cause(changes=()),)
    assert str(found.causes[0]) == "none of the changes"
    assert found.notes == ("it fails without any of the changes, so none of them is the cause",)


@pytest.mark.parametrize(("answer", "said"), [(PASSES, "it passes"), (UNRESOLVED, "cannot be run")])
def test_full_set_that_does_not_fail(answer: Answer, said: str) -> None:
    """Nothing is searched, and nothing is named."""
    minimiser = Minimiser("ab", lambda _: answer)
    with pytest.raises(NeverFails, match=f"with all changes .*{said}"):
        minimiser.causes()


def test_changes_must_be_there_once() -> None:
    """No change leaves nothing to search; one twice would be two."""
    for wrong in ([], ["a", "a"]):
        with pytest.raises(ValueError, match="Expected changes, each once"):
            Minimiser(wrong, lambda _: FAILS)


def test_limit_of_causes() -> None:
    """As many as asked for, and whether there are more."""
    for limit, complete in ((2, False), (3, True)):
        found = Minimiser("abcdef", failing(sets("a", "bc", "e"))).causes(limit=limit)
        assert len(found.causes) == limit
        assert found.complete == complete
        assert bool(found.notes) == (not complete)


@pytest.mark.parametrize("runs", range(1, 12))
def test_out_of_budget_leaves_with_the_best(runs: int) -> None:
    """What was found so far, never said to be all; the smallest set seen to fail is told."""
    left = runs

    def test(tried: Changes) -> Answer:
        nonlocal left
        if not left:
            raise OutOfBudget("the budget of runs is spent")
        left -= 1
        return failing(sets("bg", "e"))(tried)

    minimiser = Minimiser("abcdefgh", test, known={frozenset("abcdefgh"): FAILS})
    with pytest.raises(OutOfBudget) as caught:
        minimiser.causes()
    best = caught.value.best
    assert not best.complete
    assert "the budget of runs is spent" in best.notes
    assert {frozenset(c.changes) for c in best.causes} <= set(sets("bg", "e"))
    assert "the smallest set that was seen to fail: " in best.notes[-1]


def test_a_lucky_pass_is_caught_where_the_conclusion_rests_on_it() -> None:
    """The first pass of each failing set is luck: confirming names the same causes all the same."""
    causes = failing(sets("b", "df"))
    lucky: set[Changes] = set()

    def test(tried: Changes) -> Answer:
        if causes(tried) == FAILS and tried not in lucky:
            lucky.add(tried)
            return PASSES
        return causes(tried)

    whole = frozenset("abcdef")
    known: dict[Changes, Answer] = {whole: FAILS, NONE: PASSES}
    found = Minimiser("abcdef", test, confirm=causes, known=known).causes()
    assert {frozenset(c.changes) for c in found.causes} == set(sets("b", "df"))
    assert found.contradictions == ()
    assert any("passed at first and failed when asked again" in note for note in found.notes)


def test_a_lucky_pass_is_no_contradiction() -> None:
    """A set around the cause that passed once is asked again before anybody is told."""
    lucky = frozenset("abc")

    def test(tried: Changes) -> Answer:
        return PASSES if tried == lucky else failing(sets("b"))(tried)

    known: dict[Changes, Answer] = {NONE: PASSES}
    assert Minimiser("abcdef", test, known=known).causes().contradictions
    found = Minimiser("abcdef", test, confirm=failing(sets("b")), known=known).causes()
    assert (found.causes, found.contradictions) == ((Cause(changes=("b",)),), ())
    assert found.notes == ("a + b + c: passed at first and failed when asked again",)


def test_nothing_is_confirmed_that_no_conclusion_rests_on() -> None:
    """Of a single cause only that nothing else fails; of a pair, that neither fails alone too."""
    confirmed: list[Changes] = []

    def confirm(tried: Changes) -> Answer:
        confirmed.append(tried)
        return PASSES

    Minimiser("abcd", failing(sets("b")), confirm=confirm, known={NONE: PASSES}).causes()
    assert confirmed == sets("acd")
    confirmed.clear()
    Minimiser("abcd", failing(sets("bd")), confirm=confirm, known={NONE: PASSES}).causes()
    assert sorted(map(sorted, confirmed)) == [["a", "b", "c"], ["a", "c", "d"], ["b"], ["d"]]
