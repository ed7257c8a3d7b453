"""Is one program slower than another? From the step times of pairs of runs; lists in, answer out.

    typical   log of the ratio of the medians over steps, a number a pair of runs
    mean      the same of the means over steps, the longest one of 20 of each run left out
    trend     how much slower than the reference the candidate gets from the first third of the
              steps to the last, a log

The median is what a step takes, whatever disturbs single steps. It is blind to a program of which
every third step is long, so the mean must hold too. What is disturbed by others shows in some
runs' means, what the program does itself in all of them.

    passed    typical and mean below the limit, each as a whole interval
    failed    typical above it as a whole interval, or the means of all pairs are
    neither   else; or the interval is wider than the tolerance to either side and not its own
              width clear of the limit; or the verdict is a matter of which steps are looked at: a
              candidate that would fail gets faster by more than the tolerance as it runs, one that
              would pass gets slower
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from harness.paired import Interval, interval_of

Outcome = Literal["passed", "failed", "incomparable"]
LEFT_OUT = 20
"""Of so many steps the longest is left out of a run's mean, and one of fewer."""


@dataclass(frozen=True)
class Speed:
    """The answer, and what it rests on.

    Attributes:
        typical: slow-down of the median step, a log; the same for `mean` and `trend`.
        why: why there is no verdict, or what failed beside the median; "" else.
    """

    outcome: Outcome
    typical: Interval
    mean: Interval
    trend: Interval
    why: str = ""


def judge(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], tolerance: float
) -> Speed:
    """Whether `theirs` are slower than `ours` by more than a fraction.

    Args:
        ours, theirs: seconds of the timed steps of the runs of each pair, all > 0.
    """
    limit = math.log1p(tolerance)
    typical = _interval(median, ours, theirs)
    means = _logs(mean_step, ours, theirs)
    mean, trend = interval_of(means), _interval(_growth, ours, theirs)
    outcome, why = side_of(typical, limit), ""
    by_mean = side_of(Interval(min(means), mean.estimate, max(means), mean.confidence), limit)
    if outcome != "failed" and by_mean == "failed":
        outcome, why = "failed", f"the mean step is slower by {_percent(mean.estimate)}"
    elif outcome == "incomparable":
        wide = (typical.high - typical.low) / 2 > limit
        why = (
            "the noise is larger than the tolerance" if wide else "the interval holds the tolerance"
        )
    elif outcome == "passed" and side_of(mean, limit) != "passed":
        outcome = "incomparable"
        why = f"long steps leave open whether the mean step is slower, by {_percent(mean.high)}"
    if outcome == "failed" and trend.high < -limit:
        outcome = "incomparable"
        why = (
            f"the candidate gets faster by {_percent(-trend.estimate)} as it runs, skip more steps"
        )
    elif outcome == "passed" and trend.low > limit:
        outcome = "incomparable"
        why = (
            f"the candidate gets slower by {_percent(trend.estimate)} than the reference as it "
            "runs, take longer runs"
        )
    return Speed(outcome, typical, mean, trend, why)


def side_of(found: Interval, limit: float) -> Outcome:
    """On which side of the limit an interval of logs lies, if it is not too wide to say."""
    width = found.high - found.low
    clear = width if width / 2 > limit else 0.0
    if found.high <= limit - clear:
        return "passed"
    return "failed" if found.low > limit + clear else "incomparable"


def mean_step(seconds: Sequence[float]) -> float:
    """Mean over steps but the longest: one disturbed step is no property of the program."""
    kept = sorted(seconds)[: len(seconds) - math.ceil(len(seconds) / LEFT_OUT)]
    return fmean(kept or seconds)


def _growth(seconds: Sequence[float]) -> float:
    """How much longer the last third of the steps takes than the first."""
    third = max(1, len(seconds) // 3)
    return mean_step(seconds[-third:]) / mean_step(seconds[:third])


def _logs(
    of: Callable[[Sequence[float]], float],
    ours: Sequence[Sequence[float]],
    theirs: Sequence[Sequence[float]],
) -> list[float]:
    return [math.log(of(b) / of(a)) for a, b in zip(ours, theirs, strict=True)]


def _interval(
    of: Callable[[Sequence[float]], float],
    ours: Sequence[Sequence[float]],
    theirs: Sequence[Sequence[float]],
) -> Interval:
    return interval_of(_logs(of, ours, theirs))


def _percent(log: float) -> str:
    return f"{100 * math.expm1(log):.2g} %"
