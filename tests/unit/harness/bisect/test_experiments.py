"""Questions: passes that are not luck, nothing paid twice, nothing beyond a budget."""

import math
import random
from pathlib import Path

import pytest

from harness.bisect.experiments import (
    Answer,
    AskedQuestion,
    NeverFails,
    OutOfBudget,
    Questions,
    Reply,
    bounds,
    learn,
)

FAILED = Reply(answer="fails", words="it failed")


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(0, 50, 0.0, 0.1005), (50, 50, 0.8995, 1.0), (19, 20, 0.6828, 0.9998), (0, 0, 0.0, 1.0),
     (4, 10, 0.0768, 0.8091), (3, 2000, 0.0001691, 0.005478)],
)  # fmt: skip
def test_bounds_of_a_rate_are_exact(successes: int, trials: int, low: float, high: float) -> None:
    """Those of Clopper and Pearson at 99 %, as tables have them."""
    found = bounds(successes, trials)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("rate", [0.9, 0.5, 0.4])
def test_whatever_the_rate_a_fault_seldom_passes_as_often_as_asked(rate: float) -> None:
    """That it is learnt and then passes is no more frequent than the share of the doubt."""
    drawn, missed, number = random.Random(f"{rate}"), 0.0, 4000
    for _ in range(number):
        policy = learn(lambda _: "fails" if drawn.random() < rate else "passes", num_questions=1)
        missed += (1 - rate) ** policy.confirmations
    assert missed / number <= 0.01


def test_a_fault_of_every_run_is_asked_once_on_the_way() -> None:
    """And as often as 99 % takes where a conclusion rests on it; not where a pass was luck."""
    policy = learn(lambda _: "fails", num_questions=1)
    assert (policy.failures, policy.trials, policy.passes, policy.always) == (5, 5, 1, True)
    f, n = policy.failures, policy.confirmations
    worst = max((p / 999) ** f * (1 - p / 999) ** n for p in range(1000))
    assert worst <= 0.01 < worst * (1 + f / n) * math.e
    flaky = learn(lambda _: "fails", num_questions=1, flaky=True)
    assert (flaky.failures, flaky.passes) == (10, flaky.confirmations)
    assert flaky.passes > 1


@pytest.mark.parametrize(
    ("answers", "said"),
    [(["passes"], "0 of 30 runs"), (["fails", *["passes"] * 99], "2 of 200 runs"),
     (["fails", "unresolved"], "run 2 of the full case gave no answer")],
)  # fmt: skip
def test_what_fails_too_seldom_is_given_up(answers: list[Answer], said: str) -> None:
    """After 30 passes and no failure, or after 200 runs; or where a run says nothing."""
    with pytest.raises(NeverFails, match=said):
        learn(lambda number: answers[number % len(answers)], num_questions=1)


def never() -> Reply:
    raise KeyboardInterrupt


def test_a_reply_is_kept_for_the_next_sitting(tmp_path: Path) -> None:
    """It costs what it did once it is paid; what raises, or is damaged, is asked again."""
    first = Questions(3, replies=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        first.pay("a", "does a fail?", 3, never)
    assert (first.asked, list(tmp_path.iterdir())) == ((), [])
    assert first.pay("a", "does a fail?", 3, lambda: FAILED) == FAILED
    second = Questions(0, replies=tmp_path, earlier=first.asked)
    assert second.pay("a", "does a fail?", 3, never) == FAILED
    assert (second.asked, [question.runs for question in second.asked]) == (first.asked, [3])
    (path,) = tmp_path.iterdir()
    data, other = path.read_bytes(), Reply(answer="passes")
    for damaged in (data.replace(b"it", b"at"), data[:-9], b""):
        path.write_bytes(damaged)
        assert Questions(replies=tmp_path).pay("a", "a?", 1, lambda: other) == other


def test_each_question_is_told_once_and_what_was_not_come_to_is_left() -> None:
    """By its key; those of an earlier sitting are there until they are asked again."""
    told: list[tuple[int, str]] = []
    earlier = [AskedQuestion(words=w, answer="x", runs=2, seconds=1.0) for w in ("a?", "b?")]
    questions = Questions(earlier=earlier, told=lambda n, q: told.append((n, q.words)))
    for key in ("c", "a", "a"):
        questions.note(key, f"{key}?", "x", 0, 0.0)
    assert told == [(1, "c?"), (2, "a?")]
    assert [(each.words, each.runs) for each in questions.asked] == [("c?", 0), ("a?", 2)]
    assert [question.words for question in questions.left] == ["b?"]


def test_a_budget_is_kept() -> None:
    """What costs more runs than are left, or comes after the time, is not asked; the free is."""
    questions = Questions(3)
    questions.pay("b", "b?", 2, lambda: FAILED)
    with pytest.raises(OutOfBudget, match=r"budget of 3 runs: 2 spent, .* up to 2"):
        questions.pay("c", "c?", 2, never)
    questions.pay("free", "free?", 0, lambda: FAILED)
    now_s = 100.0
    timed = Questions(minutes=2, clock=lambda: now_s)
    now_s = 219.0
    timed.check(1)
    now_s = 220.0
    timed.check(0)
    with pytest.raises(OutOfBudget, match="budget of 2 minutes is spent"):
        timed.check(1)
