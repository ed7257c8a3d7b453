"""Does memory grow? A robust test of a series of bytes, one a step, that knows no model of noise.

    first quarter           left out: warm-up, captures, caches that fill
    the rest                cut into 24 windows of one length, up to its end; of each the least
                            value: what a step holds for a while, a sawtooth, a late free show in
                            single values, not in the least
    jumps taken off         an increment between windows that is above the usual one by more than 5
                            times what increments differ by (median absolute deviation) is an
                            allocation that stays; the usual one takes its place
    second half             the last 16 of these minima are tested:
    trend                   Mann-Kendall on the 16 minima, one-sided (Mann 1945, Kendall 1975), by
                            the exact distribution of its statistic
    most windows rise       more than half of the 15 increments are positive: one allocation that
                            stays, or a few, is a stair and no leak
    it goes on              the slope of the last 8 minima is at least half of that of the first 8:
                            what fills up slows down
    higher than ever        the last minimum is above those of the second quarter by half of what
                            the slope gives over the second half, with and without jumps: a long
                            sawtooth was there before
    more than noise         that growth is more than a window's median swing: a sawtooth whose
                            period is nearly a window has minima that drift with its phase
    slope                   Theil-Sen: the median over all pairs of minima (Theil 1950, Sen 1968)

It grows if all of these say so and the slope is above the limit. The level is 1e-4 a series, for
windows that do not depend on each other. Without ties the statistic of n minima is n(n-1)/2 less
twice the inversions of a random order, whose numbers are Mahonian; ties make large values rarer, so
the level holds with them.

Power: n bytes a step are found in m steps where n x m / 2 is above the swing within a window.
SLOPE.md has false alarms and power over kinds of series, and the command that measures them. What
no test can tell from a leak: memory that is given back less than once in the run, and caches that
are still filling at its end.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.soaking import LEAST_STEPS

LEVEL = 1e-4
"""Of the trend test, for one series."""
JUMP_DEVIATIONS = 5.0
"""Of a normal distribution's increments one in 1,500 is so far off."""
WINDOWS = 16
EARLIER = WINDOWS // 2
"""Windows of the second quarter, as long as those."""


@dataclass(frozen=True, kw_only=True)
class Slope:
    """What a series does.

    Attributes:
        bytes_per_step: Theil-Sen slope of its second half.
        chance: of a trend as strong or stronger in a series without one.
        rising: increments between windows that are positive, of `WINDOWS` - 1.
        goes_on: whether the end rises at half the pace before it, at least.
        stands_out: whether it ends higher than ever, by more than noise.
    """

    bytes_per_step: float
    chance: float
    rising: int
    goes_on: bool
    stands_out: bool

    def grows(self, limit: float = 0.0) -> bool:
        """Whether it grows by more than `limit` bytes a step."""
        is_trend = self.chance <= LEVEL and 2 * self.rising > WINDOWS - 1
        is_lasting = self.goes_on and self.stands_out
        return is_trend and is_lasting and self.bytes_per_step > limit


def slope_of(series: Sequence[float], steps_apart: float = 1.0) -> Slope:
    """Test a series.

    Args:
        series: bytes, `LEAST_STEPS` values at least.
        steps_apart: steps between two values.

    Raises:
        ValueError: too few values.
    """
    if len(series) < LEAST_STEPS:
        raise ValueError(f"Expected {LEAST_STEPS} values at least, got {len(series)}.")
    late = series[len(series) // 4 :]
    # Of one length, or a longer window's share of a leak would count as a jump.
    length, over = divmod(len(late), EARLIER + WINDOWS)
    edges = [over + i * length for i in range(EARLIER + WINDOWS + 1)]
    windows = [late[a:b] for a, b in itertools.pairwise(edges)]
    found = [min(w) for w in windows]
    smooth = without_jumps(found)
    minima = smooth[EARLIER:]
    middles = [(a + b) / 2 * steps_apart for a, b in itertools.pairwise(edges)][EARLIER:]
    half = WINDOWS // 2
    first, last = (
        theil_sen(middles[part], minima[part]) for part in (slice(half), slice(half, None))
    )
    increments = [b - a for a, b in itertools.pairwise(minima)]
    slope = theil_sen(middles, minima)
    growth, a_window = slope * (middles[-1] - middles[0]), slope * (middles[1] - middles[0])
    swing = statistics.median(max(w) - min(w) for w in windows[EARLIER:]) - a_window
    return Slope(
        bytes_per_step=slope,
        chance=chance_of_trend(minima),
        rising=sum(each > 0 for each in increments),
        goes_on=last > 0 and last >= first / 2,
        stands_out=growth > swing
        and all(each[-1] - max(each[:EARLIER]) >= growth / 2 for each in (found, smooth)),
    )


def without_jumps(values: Sequence[float]) -> list[float]:
    """The series with the usual increment in the place of each that is far above it.

    Falls stay: without its falls a sawtooth would rise for ever.
    """
    increments = [b - a for a, b in itertools.pairwise(values)]
    middle = statistics.median(increments)
    most = middle + JUMP_DEVIATIONS * statistics.median(abs(each - middle) for each in increments)
    # Of those that are none: jumps move the median of all.
    usual = statistics.median(each for each in increments if each <= most)
    kept = [each if each <= most else usual for each in increments]
    return list(itertools.accumulate(kept, initial=values[0]))


def theil_sen(places: Sequence[float], values: Sequence[float]) -> float:
    """Median of the slopes of all pairs; places are distinct."""
    pairs = range(len(places))
    return statistics.median(
        (values[j] - values[i]) / (places[j] - places[i]) for i in pairs for j in pairs if i < j
    )


def chance_of_trend(values: Sequence[float]) -> float:
    """Chance that a random order of distinct values rises as much as these do, or more."""
    number = len(values)
    statistic = sum(
        (values[j] > values[i]) - (values[j] < values[i])
        for i in range(number)
        for j in range(i + 1, number)
    )
    # S = pairs - 2 x inversions: as large an S means at most so many inversions.
    most = (number * (number - 1) // 2 - statistic) // 2
    return sum(_inversions(number)[: most + 1]) / math.factorial(number)


@functools.cache
def _inversions(number: int) -> tuple[int, ...]:
    """How many orders of `number` values have 0, 1, 2, ... inversions."""
    counts = [1]
    for size in range(2, number + 1):
        # A value put in front of `size` - 1 others adds 0 to `size` - 1 inversions.
        sums = [0]
        for count in counts + [0] * (size - 1):
            sums.append(sums[-1] + count)
        counts = [
            sums[place + 1] - sums[max(place + 1 - size, 0)] for place in range(len(sums) - 1)
        ]
    return tuple(counts)
