"""How often noise is taken for a lasting change, and how soon a step of three deviations is found.

    python -m benchmarks.change_points [SERIES]

Series of 60 nights, by kind of noise: normal; Laplace; `odd`, normal with one night in twenty six
times as far out; `alike`, normal where each night is correlated with the one before by 0.3;
`drifting`, by 1.2 deviations in 60 nights; `two_hosts`, three deviations apart, one of which is
drawn each night; `sticky_hosts`, where nine of ten nights keep the host of the one before. `last`
is the share of series with a false alarm when looked at once, at the last night; `ever` if looked
at every night from the first on which anything is told.

Then the share of steps of three deviations that are placed within two nights, three to five and
three to ten nights after, by how many nights came before; beside it what Student's t finds by the
fifth that knows where to look, which no test of one series at this level can exceed. `over` is the
same for the step time over the reference's, if of the night's deviation nine tenths are moods of
the machine that both legs share. Last, `harness compare` on equal runs: the share with an alarm, by
noise and number of cases. About a minute for 100 series.
"""

import math
import random
import sys
from collections.abc import Callable
from statistics import NormalDist, fmean, variance

from harness.checks.within import quantile
from harness.history.comparison import FALSE_ALARMS, noise_of
from harness.history.trend import MIN_HISTORY, MIN_VALUES, Z_LIMIT, find_changes

NIGHTS = 60
Series = Callable[[random.Random, int], list[float]]


def normal(source: random.Random, count: int) -> list[float]:
    """Values around 100 with a deviation of 1 %."""
    return [100 + source.gauss(0, 1) for _ in range(count)]


def laplace(source: random.Random, count: int) -> list[float]:
    """Heavier tails."""
    return [100 + source.expovariate(1) - source.expovariate(1) for _ in range(count)]


def odd(source: random.Random, count: int) -> list[float]:
    """One night in twenty is six times as far out."""
    return [100 + source.gauss(0, 6 if source.random() < 0.05 else 1) for _ in range(count)]


def alike(source: random.Random, count: int) -> list[float]:
    """Each night resembles the one before."""
    value, values = 0.0, []
    for _ in range(count):
        value = 0.3 * value + source.gauss(0, 1)
        values.append(100 + value)
    return values


def drifting(source: random.Random, count: int) -> list[float]:
    """A machine that gets slower by and by."""
    return [100 + 1.2 * night / NIGHTS + source.gauss(0, 1) for night in range(count)]


def two_hosts(source: random.Random, count: int) -> list[float]:
    """One of two machines, as it happens."""
    return [100 + source.choice((0, 3)) + source.gauss(0, 1) for _ in range(count)]


def sticky_hosts(source: random.Random, count: int) -> list[float]:
    """One of two machines, mostly that of the night before."""
    host, values = 0, []
    for _ in range(count):
        host = source.choice((0, 3)) if source.random() < 0.2 else host
        values.append(100 + host + source.gauss(0, 1))
    return values


def over_the_reference(source: random.Random, count: int) -> list[float]:
    """A candidate over two runs of its reference, in moods that all share: 1 % in all."""
    own = math.sqrt(1 - 0.9**2)
    return [
        100 + own * (source.gauss(0, 1) - fmean(source.gauss(0, 1) for _ in range(2)))
        for _ in range(count)
    ]


def false_alarms(noise: Series, series: int, source: random.Random) -> tuple[float, float]:
    """Shares of series with a false alarm at the last night, and at any night."""
    last = ever = 0
    for _ in range(series):
        values = noise(source, NIGHTS)
        alarms = [bool(find_changes(values[:end])) for end in range(MIN_HISTORY, NIGHTS + 1)]
        last += alarms[-1]
        ever += any(alarms)
    return last / series, ever / series


def found_within(
    before: int, series: int, source: random.Random, noise: Series = normal
) -> tuple[float, float]:
    """Shares of steps after `before` nights that are found within 5 and within 10 nights."""
    delays = []
    for _ in range(series):
        values = noise(source, before) + [value + 3 for value in noise(source, 10)]
        ends = (
            end
            for end in range(before + MIN_VALUES, len(values) + 1)
            if any(abs(change.at - before) <= 2 for change in find_changes(values[:end]))
        )
        delays.append(next(ends, NIGHTS * 2) - before)
    return sum(d <= 5 for d in delays) / series, sum(d <= 10 for d in delays) / series


def told_by_t(before: int, after: int, source: random.Random, series: int = 2000) -> float:
    """Share of steps after `before` nights that a t-test of the right border sees."""
    free, found = before + after - 2, 0
    limit = quantile(2 * NormalDist().cdf(-Z_LIMIT), free)
    for _ in range(series):
        left, right = normal(source, before), normal(source, after)
        pooled = ((before - 1) * variance(left) + (after - 1) * variance(right)) / free
        found += fmean(right) + 3 - fmean(left) > limit * math.sqrt(
            pooled * (1 / before + 1 / after)
        )
    return found / series


def compare_alarms(noise: Series, cases: int, trials: int, source: random.Random) -> float:
    """Share of comparisons of equal runs in which a case is told to be slower."""
    alarms = 0
    for _ in range(trials):
        runs = noise(source, 6 * cases)
        far = [a - b for a, b in zip(runs[::2], runs[1::2], strict=True)]
        found = noise_of([abs(distance) for distance in far[cases:]], FALSE_ALARMS / cases)
        alarms += max(far[:cases]) > max(found.factor * (found.deviation or 0.0), found.least)
    return alarms / trials


def main(series: int = 200) -> None:
    """Print the shares."""
    print(f"{series} series each, seed 1\n\nnoise    false alarm: last   ever")
    for noise in (normal, laplace, odd, alike, drifting, two_hosts, sticky_hosts):
        last, ever = false_alarms(noise, series, random.Random(1))
        print(f"{noise.__name__:<20} {last:7.2%} {ever:7.2%}", flush=True)
    print("\nnights before   found within 5   10 nights   t knows 5   over: 5   10 nights")
    for before in (15, 30, 55):
        five, ten = found_within(before, series, random.Random(1))
        best = told_by_t(before, 5, random.Random(1))
        over = found_within(before, series, random.Random(1), over_the_reference)
        print(f"{before:<15} {five:14.1%} {ten:11.1%} {best:11.1%} {over[0]:9.1%} {over[1]:11.1%}")
    print("\ncompare: noise      1 case   10 cases   100 cases")
    for noise in (normal, laplace, odd):
        shares = [
            compare_alarms(noise, cases, max(400, 20_000 // cases), random.Random(1))
            for cases in (1, 10, 100)
        ]
        print(f"{noise.__name__:<20} {shares[0]:5.2%} {shares[1]:10.2%} {shares[2]:11.2%}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
