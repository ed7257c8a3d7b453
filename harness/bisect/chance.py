"""Chance: exact bounds on a rate, and how often a run must pass before it is believed to.

A fault that fires in 30 % of runs passes most of them, so one pass says little; a failure is
certain, as a right program never fails. So a question is asked until it fails, or has passed so
many times in a row that this would be rare for a fault (`Patience.passes`).

How rare depends on the rate, which nobody knows. `learn` runs the full failing case until it has
failed `failures` times, which takes `trials` runs, more of them the rarer the fault. Asking
`c * trials` times then misses with a probability that is bounded for every rate alike: with
c = miss ** (-1 / failures) - 1 it is at most `miss` (it tends to (1 + c) ** -failures from
below as the rate goes to 0). That is half of the runs that a lower bound on the rate would ask for,
as no confidence is spent on the rate itself.

What it assumes: runs are independent, and what fails fails no less often than the full case.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from harness.codec import Json
from harness.errors import HarnessError
from harness.records import ExitCode

Answer = Literal["fails", "passes", "unresolved"]
"""What runs said. `unresolved`: they could not be made, or failed in another way."""
FAILS: Final = "fails"
PASSES: Final = "passes"
UNRESOLVED: Final = "unresolved"
CONFIDENCE = 0.99
ALWAYS_AFTER = 5
"""Failures in a row, from the first run on, after which a fault is taken for one of every run."""
FAILURES = 10
"""Failures of the full case after which its rate is known well enough, if some runs passed."""
MAX_TRIALS = 200
MAX_SILENT = 30
"""Passes of the full case, and no failure, after which it is given up: 2 in 100,000 at 30 %."""
_HALVINGS = 200


@dataclass(frozen=True, kw_only=True)
class Bounds(Json):
    """Exact (Clopper-Pearson) bounds on a rate.

    Attributes:
        low, high: the rate lies between them, with at least the confidence asked for.
        successes, trials: what was counted.
    """

    low: float
    high: float
    successes: int
    trials: int

    def __str__(self) -> str:
        """As a table has it: `19/20 (75.1 to 99.9 %)`, rounded outwards."""
        low, high = math.floor(self.low * 1000) / 10, math.ceil(self.high * 1000) / 10
        return f"{self.successes}/{self.trials} ({low:g} to {high:g} %)"


@functools.cache
def bounds(successes: int, trials: int, confidence: float = CONFIDENCE) -> Bounds:
    """Bounds on the rate of which `successes` in `trials` were seen; no trial says 0 to 1.

    Args:
        successes: from 0 to `trials`.
        trials: independent ones.
        confidence: with which the rate lies between the bounds, whatever it is.

    Raises:
        ValueError: more successes than trials, or a confidence not between 0 and 1.
    """
    if not 0 <= successes <= trials or not 0 < confidence < 1:
        raise ValueError(
            f"Expected 0 <= successes <= trials and 0 < confidence < 1, "
            f"got {successes}, {trials}, {confidence}"
        )
    doubt = (1 - confidence) / 2
    low = _rate(doubt, successes, trials) if successes else 0.0
    # The failures are at least so many: the same bound, seen from the other end.
    high = 1 - _rate(doubt, trials - successes, trials) if successes < trials else 1.0
    return Bounds(low=low, high=high, successes=successes, trials=trials)


def at_least(successes: int, trials: int, rate: float) -> float:
    """Probability of `successes` or more in `trials` of a rate: the sum of the binomial terms."""
    if successes <= 0 or rate >= 1:
        return 1.0
    if rate <= 0 or successes > trials:
        return 0.0
    if successes <= trials * rate:
        # The other tail is the smaller one, so less is lost in the sum.
        return 1.0 - _upper_tail(trials - successes + 1, trials, 1 - rate)
    return _upper_tail(successes, trials, rate)


def _upper_tail(successes: int, trials: int, rate: float) -> float:
    log_term = (
        math.lgamma(trials + 1) - math.lgamma(successes + 1) - math.lgamma(trials - successes + 1)
        + successes * math.log(rate) + (trials - successes) * math.log1p(-rate)
    )  # fmt: skip
    odds = rate / (1 - rate)
    term, terms = 1.0, [1.0]
    for count in range(successes, trials):
        term *= odds * (trials - count) / (count + 1)
        terms.append(term)
        if term < 1e-18:
            break
    return min(math.exp(log_term) * math.fsum(terms), 1.0)


def _rate(doubt: float, successes: int, trials: int) -> float:
    """The rate at which `successes` or more have just the probability `doubt`, from below."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if at_least(successes, trials, middle) < doubt else (low, middle)
    return low


# --- how often to ask ------------------------------------------------------------------------


def passes_needed(rate: float, miss: float) -> int:
    """Passes in a row that a fault of at least this rate shows with probability `miss` at most.

    Raises:
        ValueError: a rate or a probability that is not between 0 and 1, or a rate of 0.
    """
    if not 0 < rate <= 1 or not 0 < miss < 1:
        raise ValueError(f"Expected 0 < rate <= 1 and 0 < miss < 1, got {rate}, {miss}")
    return 1 if rate == 1 else max(math.ceil(math.log(miss) / math.log1p(-rate)), 1)


@dataclass(frozen=True, kw_only=True)
class Patience(Json):
    """How often a question is asked before its passes are believed; made by `learn`.

    Attributes:
        failures, trials: of the full failing case.
        confidence: with which no answer of the search is wrong.
        num_questions: among which the doubt is shared.
        passes: in a row, for a question on the way.
        confirmations: in a row, for an answer that the conclusion rests on.
    """

    failures: int
    trials: int
    confidence: float
    num_questions: int
    passes: int
    confirmations: int

    @property
    def always(self) -> bool:
        """Whether the fault is taken for one of every run."""
        return self.passes < self.confirmations

    @property
    def rate(self) -> Bounds:
        """Of the full case, at the same confidence."""
        return bounds(self.failures, self.trials, self.confidence)

    def __str__(self) -> str:
        """For people."""
        seen = f"the full case failed in {self.failures} of {self.trials} runs"
        if self.always:
            return (
                f"{seen}: one pass is believed on the way, {self.confirmations} where the "
                f"conclusion rests on it ({self.confidence:.4g} confidence)"
            )
        low = f"{100 * self.rate.low:.3g}"
        return (
            f"{seen} (a rate of {low} % or more): {self.passes} passes in a row are believed "
            f"({self.confidence:.4g} confidence over {self.num_questions} questions)"
        )


def patience(
    failures: int,
    trials: int,
    *,
    num_questions: int,
    confidence: float = CONFIDENCE,
    flaky: bool = False,
) -> Patience:
    """How often to ask, once the full case has failed `failures` times in `trials` runs.

    The number of failures must have been fixed before, and `trials` be what they took. A fault that
    failed every time is asked once a question. `confirmations` makes up for it: that a fault of any
    rate fails so often and then passes so often has probability 1 - confidence at most.

    Args:
        failures, trials: of the full case.
        num_questions: that the search will ask, or confirm.
        confidence: with which no answer of the search shall be wrong.
        flaky: a set that fails has been seen to pass, so once is never enough.

    Raises:
        ValueError: no failure, fewer trials than failures, or a count or confidence out of range.
    """
    if not 1 <= failures <= trials or num_questions < 1 or not 0 < confidence < 1:
        raise ValueError(
            "Expected 1 <= failures <= trials, a question or more, and 0 < confidence < 1, "
            f"got {failures}, {trials}, {num_questions}, {confidence}"
        )
    miss = (1 - confidence) / num_questions
    if failures == trials and not flaky:
        passes, confirmations = 1, _confirmations(failures, miss)
    else:
        times = miss ** (-1 / failures) - 1
        passes = confirmations = max(math.ceil(times * trials), 1)
    return Patience(
        failures=failures, trials=trials, confidence=confidence, num_questions=num_questions,
        passes=passes, confirmations=confirmations,
    )  # fmt: skip


def _confirmations(failures: int, miss: float) -> int:
    """Passes in a row that no rate shows, after as many failures, with more probability than that.

    The worst rate for `rate ** failures * (1 - rate) ** passes` is where its slope is 0.
    """
    passes = 1
    while True:
        worst = failures / (failures + passes)
        if worst**failures * (1 - worst) ** passes <= miss:
            return passes
        passes += 1


class NeverFails(HarnessError):
    """The full case does not fail, or too seldom, so there is nothing to search for."""

    exit_code: ClassVar[ExitCode] = ExitCode.NO_VERDICT


def learn(
    run: Callable[[int], Answer],
    *,
    num_questions: int,
    confidence: float = CONFIDENCE,
    flaky: bool = False,
) -> Patience:
    """Run the full failing case until its rate is known well enough.

    Args:
        run: one run of it; takes the number of runs before.
        num_questions: that the search will ask.
        confidence: with which no answer of the search shall be wrong.
        flaky: a set that fails has been seen to pass.

    Raises:
        NeverFails: it failed too seldom in `MAX_TRIALS` runs, or could not be run.
    """
    answers: list[Answer] = []
    while answers.count(FAILS) < (FAILURES if flaky or PASSES in answers else ALWAYS_AFTER):
        if len(answers) == (MAX_TRIALS if FAILS in answers else MAX_SILENT):
            seen = answers.count(FAILS)
            raise NeverFails(f"the full case failed in {seen} of {len(answers)} runs: too seldom")
        answers.append(run(len(answers)))
        if answers[-1] == UNRESOLVED:
            raise NeverFails(f"run {len(answers)} of the full case gave no answer")
    return patience(
        answers.count(FAILS), len(answers),
        num_questions=num_questions, confidence=confidence, flaky=flaky,
    )  # fmt: skip


def ask(run: Callable[[int], Answer], passes: int, before: int = 0) -> tuple[Answer, int]:
    """Run until it fails, or has passed `passes` times in a row: the answer, and the runs it took.

    Args:
        run: one run; takes the number of runs before.
        passes: from which on it passes.
        before: passes that are known already, and count.
    """
    for number in range(before, passes):
        answer = run(number)
        if answer != PASSES:
            # A failure is certain; what cannot be run once is not run again and again.
            return answer, number + 1 - before
    return PASSES, max(passes - before, 0)
