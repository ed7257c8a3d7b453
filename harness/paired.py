"""How much two things measured in pairs differ: an estimate and an interval, whatever the noise.

The Hodges-Lehmann estimate and Tukey's interval (Hollander, Wolfe and Chicken, Nonparametric
Statistical Methods, 2014, sections 3.2 and 3.3): of n differences, all n (n + 1) / 2 means of two
of them, each with itself too, are sorted; the estimate is their median, and the interval leaves out
the k least and the k greatest. The probability that it misses follows from the signed-rank
distribution, counted exactly, and asks of the noise only that it is as likely up as down: no normal
distribution, no variance to guess from six numbers, no random numbers, so the same records always
get the same answer.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
LEAST_PAIRS = 6
"""The fewest whose interval can be as sure as `CONFIDENCE`: of five even the widest is not."""


@dataclass(frozen=True)
class Interval:
    """An estimate with an interval around it.

    Attributes:
        confidence: how often at least such an interval holds the true value.
    """

    low: float
    estimate: float
    high: float
    confidence: float


def interval_of(differences: Sequence[float]) -> Interval:
    """The location of `differences`, each the outcome of one pair.

    Raises:
        ValueError: fewer than `LEAST_PAIRS`, or one that is not finite.
    """
    number = len(differences)
    if number < LEAST_PAIRS:
        raise ValueError(f"Expected at least {LEAST_PAIRS} differences, got {number}.")
    if not all(map(math.isfinite, differences)):
        raise ValueError(f"Expected finite differences, got {list(differences)}.")
    means = sorted(
        (differences[i] + differences[j]) / 2 for i in range(number) for j in range(i, number)
    )
    left_out, missed = _trim(number)
    middle = len(means) // 2
    estimate = means[middle] if len(means) % 2 else (means[middle - 1] + means[middle]) / 2
    return Interval(means[left_out], estimate, means[-1 - left_out], 1.0 - missed)


@functools.cache
def _trim(number: int) -> tuple[int, float]:
    """How many means to leave out at each end, and the probability that the interval misses."""
    ways = [1]
    for rank in range(1, number + 1):
        # Ways to reach each sum with the ranks so far: without this one, and with it.
        longer = [0] * rank
        ways = [a + b for a, b in zip([*ways, *longer], [*longer, *ways], strict=True)]
    total, left_out, below = 2**number, 0, 0
    for reached, count in enumerate(ways):
        if 2 * (below + count) > (1.0 - CONFIDENCE) * total:
            break
        below += count
        left_out = reached + 1
    # To leave out none is to trust the extremes; that is the step before the first sum.
    return left_out - 1, 2 * below / total
