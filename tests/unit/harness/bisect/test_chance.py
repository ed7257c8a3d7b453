"""Contracts of harness.bisect.chance: bounds that hold, and passes that are not luck."""

import math
import random
from collections.abc import Callable
from fractions import Fraction

import pytest

from harness.bisect.chance import (
    ALWAYS_AFTER,
    FAILS,
    FAILURES,
    PASSES,
    UNRESOLVED,
    Answer,
    NeverFails,
    ask,
    at_least,
    bounds,
    learn,
    passes_needed,
    patience,
)


def chance_of_missing(rate: float, passes_per_trial: float, failures: int) -> float:
    """That a fault passes `passes_per_trial * trials` times, over all `trials` that it may take.

    `trials` being what it takes to see so many failures: a sum of geometric waits, of which this is
    the generating function.
    """
    quiet = (1 - rate) ** passes_per_trial
    return float((rate * quiet / (1 - (1 - rate) * quiet)) ** failures)


def exact_tail(successes: int, trials: int, rate: Fraction) -> Fraction:
    """The binomial sum in whole numbers."""
    return sum(
        (
            math.comb(trials, n) * rate**n * (1 - rate) ** (trials - n)
            for n in range(successes, trials + 1)
        ),
        Fraction(0),
    )


@pytest.mark.parametrize("trials", [1, 7, 200])
def test_the_tail_is_the_binomial_sum(trials: int) -> None:
    """To 12 digits of its own size, however small: a doubt of 1e-9 must be one."""
    for rate in (Fraction(1, 1000), Fraction(3, 10), Fraction(99, 100)):
        for successes in {0, 1, trials // 3, trials - 1, trials}:
            exact = float(exact_tail(successes, trials, rate))
            # The complement of a tail has its digits beside 1, not of its own size.
            size = exact if successes > trials * rate else 1.0
            assert abs(at_least(successes, trials, float(rate)) - exact) <= 1e-12 * size


@pytest.mark.parametrize(("successes", "trials"), [(0, 1), (1, 1), (3, 10), (95, 100), (199, 200)])
@pytest.mark.parametrize("confidence", [0.9, 0.99])
def test_bounds_are_where_the_data_become_rare(
    successes: int, trials: int, confidence: float
) -> None:
    """At either bound, what was seen or more of it has just half of the doubt."""
    found, doubt = bounds(successes, trials, confidence), (1 - confidence) / 2
    assert found.low <= successes / trials <= found.high
    if successes:
        assert float(exact_tail(successes, trials, Fraction(found.low))) == pytest.approx(doubt)
    else:
        assert found.low == 0
    if successes < trials:
        below = 1 - exact_tail(successes + 1, trials, Fraction(found.high))
        assert float(below) == pytest.approx(doubt)
    else:
        assert found.high == 1


def test_bounds_of_known_cases() -> None:
    """By hand: none of n (and all of n) have a closed form."""
    assert bounds(40, 40, 0.95).low == pytest.approx(0.025 ** (1 / 40))
    assert bounds(0, 200, 0.95).high == pytest.approx(1 - 0.025 ** (1 / 200))
    assert (bounds(0, 0).low, bounds(0, 0).high) == (0, 1)
    assert str(bounds(0, 200, 0.95)) == "0/200 (0 to 1.9 %)"


@pytest.mark.parametrize("wrong", [(2, 1, 0.9), (-1, 1, 0.9), (0, 1, 0.0), (0, 1, 1.0)])
def test_bounds_of_nothing_real(wrong: tuple[int, int, float]) -> None:
    """Counts and confidences that cannot be are errors."""
    with pytest.raises(ValueError, match="Expected 0 <= successes"):
        bounds(*wrong)


def test_passes_needed_is_the_smallest_number() -> None:
    """One pass less is too likely for a fault of that rate."""
    for rate in (0.01, 0.3, 0.999):
        for miss in (0.1, 0.01 / 12):
            number = passes_needed(rate, miss)
            assert (1 - rate) ** number <= miss
            assert number == 1 or (1 - rate) ** (number - 1) > miss
    assert passes_needed(1, 0.01) == 1
    with pytest.raises(ValueError, match="Expected 0 < rate"):
        passes_needed(0, 0.01)


def test_no_rate_is_missed_more_often_than_said() -> None:
    """Over all rates, and over how long it took to learn them: the share of one question."""
    for num_questions in (1, 7, 40):
        miss = 0.01 / num_questions
        per_trial = miss ** (-1 / FAILURES) - 1
        shares = [
            chance_of_missing(rate / 500, per_trial, FAILURES) / miss for rate in range(1, 500)
        ]
        assert 0.9 < max(shares) <= 1  # and it is no more careful than it must be


def test_the_chance_of_missing_is_the_sum_over_trials() -> None:
    """By the negative binomial distribution, term by term."""
    rate, per_trial, failures = 0.3, 0.7, 4
    total = math.fsum(
        math.comb(n - 1, failures - 1) * rate**failures * (1 - rate) ** (n - failures)
        * (1 - rate) ** (per_trial * n)
        for n in range(failures, 400)
    )  # fmt: skip
    assert chance_of_missing(rate, per_trial, failures) == pytest.approx(total)


def test_a_fault_that_always_failed_is_confirmed() -> None:
    """Of all rates none fails five times and then passes the confirmations, but rarely."""
    known = patience(ALWAYS_AFTER, ALWAYS_AFTER, num_questions=3)
    assert known.always
    assert known.passes == 1
    rates = [rate / 1000 for rate in range(1001)]
    for passes, enough in ((known.confirmations, True), (known.confirmations - 1, False)):
        worst = max(rate**ALWAYS_AFTER * (1 - rate) ** passes for rate in rates)
        assert (worst <= 0.01 / 3) == enough


def test_once_seen_to_pass_it_is_not_believed_at_once() -> None:
    """A set that failed ten times in ten, and is known to have passed, is asked more than once."""
    assert patience(10, 10, num_questions=7, flaky=True).passes > 1


def script(answers: str) -> Callable[[int], Answer]:
    """A run that answers letter by letter, and is never asked for more."""
    known: dict[str, Answer] = {"f": FAILS, "p": PASSES, "u": UNRESOLVED}
    return lambda number: known[answers[number]]


def test_learning_stops_when_it_knows() -> None:
    """Five failures in a row, or ten in all once a run has passed."""
    known = learn(script("fffff"), num_questions=7)
    assert (known.failures, known.trials, known.passes) == (5, 5, 1)
    known = learn(script("ffffp" + "pf" * 6), num_questions=7)
    assert (known.failures, known.trials) == (10, 17)
    assert learn(script("f" * 10), num_questions=7, flaky=True).trials == 10


def test_nothing_is_learnt_of_a_case_that_does_not_fail() -> None:
    """It passes, or it cannot be run: said, and not searched."""
    with pytest.raises(NeverFails, match="failed in 0 of 30 runs"):
        learn(script("p" * 30), num_questions=7)
    with pytest.raises(NeverFails, match="failed in 1 of 200 runs"):
        learn(script("f" + "p" * 199), num_questions=7)
    with pytest.raises(NeverFails, match="run 2 of the full case gave no answer"):
        learn(script("fu"), num_questions=7)


def test_asking_stops_at_the_first_failure() -> None:
    """A failure is certain, what cannot be run is not run again, and known passes count."""
    assert ask(script("ppf"), 9) == (FAILS, 3)
    assert ask(script("u"), 9) == (UNRESOLVED, 1)
    assert ask(script("pppp"), 4) == (PASSES, 4)
    assert ask(script("xxppp"), 5, before=2) == (PASSES, 3)


def test_a_fault_of_thirty_percent_is_halved_right() -> None:
    """Wrong answers of 400 searches over 64 commits stay within what 99 % allows."""
    wrong = 0
    for seed in range(400):
        drawn = random.Random(seed)
        first_bad = drawn.randrange(1, 64)

        def run(number: int, drawn: random.Random = drawn) -> Answer:
            return FAILS if drawn.random() < 0.3 else PASSES

        known = learn(run, num_questions=6)
        good, bad = 0, 63
        while bad - good > 1:
            middle = (good + bad) // 2
            if middle >= first_bad and ask(run, known.passes)[0] == FAILS:
                bad = middle
            else:
                good = middle
        wrong += bad != first_bad
    # More than that would have one chance in a thousand at a rate of 1 %.
    assert at_least(wrong, 400, 0.01) > 0.001
