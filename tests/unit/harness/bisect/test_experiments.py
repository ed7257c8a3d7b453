"""Contracts of harness.bisect.experiments: nothing is paid twice, nothing beyond a budget."""

from pathlib import Path

import pytest

from harness.bisect.experiments import AskedQuestion, Budget, OutOfBudget, Questions, Reply
from harness.errors import UsageError

FAILS = Reply(answer="fails", words="it failed", detail={"step": 3})


def never() -> Reply:
    raise AssertionError("asked again")


def words_of(questions: Questions) -> list[str]:
    return [question.words for question in questions.asked]


def test_a_reply_is_kept_for_the_next_sitting(tmp_path: Path) -> None:
    """It is in a file of its own, and costs what it did once it is paid."""
    first = Questions(Budget(runs=3), replies=tmp_path / "replies")
    assert first.pay("a", "does a fail?", 3, lambda: FAILS) == FAILS
    second = Questions(Budget(runs=0), replies=tmp_path / "replies", earlier=first.asked)
    assert second.pay("a", "does a fail?", 3, never) == FAILS
    assert second.asked == first.asked
    assert [question.runs for question in second.asked] == [3]
    assert Questions().pay("a", "does a fail?", 3, Reply) == Reply()


def test_what_raises_is_asked_again(tmp_path: Path) -> None:
    """Ctrl-C in a question leaves no answer behind, and nothing is paid for it."""

    def interrupted() -> Reply:
        raise KeyboardInterrupt

    questions = Questions(Budget(runs=1), replies=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        questions.pay("a", "a?", 1, interrupted)
    assert (questions.asked, list(tmp_path.iterdir())) == ((), [])
    assert questions.pay("a", "a?", 1, lambda: FAILS) == FAILS


def test_a_damaged_reply_is_asked_again(tmp_path: Path) -> None:
    """One bit of it, or a part of it."""
    questions = Questions(replies=tmp_path)
    questions.pay("a", "a?", 1, lambda: FAILS)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    for damaged in (data.replace(b"3", b"4"), data[:-9], b""):
        path.write_bytes(damaged)
        assert Questions(replies=tmp_path).pay("a", "a?", 1, Reply) == Reply()


def test_each_question_is_told_once_and_what_was_not_come_to_is_left() -> None:
    """By its key; those of an earlier sitting are there until they are asked again."""
    told: list[tuple[int, str]] = []
    earlier = [AskedQuestion(words=w, answer="x", runs=2, seconds=1.0) for w in ("a?", "b?")]
    questions = Questions(earlier=earlier, told=lambda n, q: told.append((n, q.words)))
    for key in ("c", "a", "a"):
        questions.note(key, f"{key}?", "x", 0, 0.0)
    assert told == [(1, "c?"), (2, "a?")]
    assert [question.runs for question in questions.asked] == [0, 2]
    assert words_of(questions) == ["c?", "a?"]
    assert [question.words for question in questions.left] == ["b?"]


def test_a_budget_of_runs() -> None:
    """What costs more than is left is not asked; what is free costs nothing."""
    questions = Questions(Budget(runs=3))
    questions.pay("b", "b?", 2, lambda: FAILS)
    with pytest.raises(OutOfBudget, match=r"budget of 3 runs: 2 spent, .* up to 2"):
        questions.pay("c", "c?", 2, never)
    questions.pay("c", "c?", 1, lambda: FAILS)
    with pytest.raises(OutOfBudget):
        questions.pay("d", "d?", 1, never)
    questions.pay("free", "free?", 0, lambda: FAILS)
    assert words_of(questions) == ["b?", "c?", "free?"]


def test_a_budget_of_minutes() -> None:
    """Time is over for what costs a run, and counts from the beginning of the sitting."""
    now_s = 100.0
    budget = Budget(minutes=2, clock=lambda: now_s)
    now_s = 219.0
    budget.check(1)
    now_s = 220.0
    budget.check(0)
    with pytest.raises(OutOfBudget, match="budget of 2 minutes is spent"):
        budget.check(1)


@pytest.mark.parametrize("wrong", [{"runs": -1}, {"minutes": -1.0}, {"minutes": float("nan")}])
def test_a_budget_that_cannot_be(wrong: dict[str, float]) -> None:
    """One line for the user."""
    with pytest.raises(UsageError, match="budget: expected"):
        Budget(**wrong)  # type: ignore[arg-type]
