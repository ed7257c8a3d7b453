"""How often noise is taken for a lasting change, and how soon a step of three deviations is found.

    python -m benchmarks.change_points [SERIES]

Series of 60 runs, by kind of noise. `last` is the share of series with a false alarm when looked at
once, at the last run; `ever` if looked at every run from the first on which a change can be found.
Then the share of steps of three deviations that are placed within two runs, by how many runs came
before. Last, `harness compare` on equal runs: the share of comparisons with an alarm.
"""

import random
import sys
from collections.abc import Callable

from harness.history.trend import FALSE_ALARMS, MIN_HISTORY, MIN_VALUES, find_change, noise_of

RUNS = 60
Series = Callable[[random.Random, int], list[float]]


def normal(source: random.Random, count: int) -> list[float]:
    """Values around 100 with a deviation of 1 %."""
    return [100 + source.gauss(0, 1) for _ in range(count)]


def laplace(source: random.Random, count: int) -> list[float]:
    """Heavier tails."""
    return [100 + source.expovariate(1) - source.expovariate(1) for _ in range(count)]


def odd(source: random.Random, count: int) -> list[float]:
    """One run in twenty is six times as far out."""
    return [100 + source.gauss(0, 6 if source.random() < 0.05 else 1) for _ in range(count)]


def alike(source: random.Random, count: int) -> list[float]:
    """Each run is correlated with the one before by 0.3."""
    value, values = 0.0, []
    for _ in range(count):
        value = 0.3 * value + source.gauss(0, 1)
        values.append(100 + value)
    return values


def two_hosts(source: random.Random, count: int) -> list[float]:
    """One of two machines, three deviations apart, drawn for each run."""
    return [100 + source.choice((0, 3)) + source.gauss(0, 1) for _ in range(count)]


def two_levels(source: random.Random, count: int) -> list[float]:
    """One of two values without noise, as peaks of memory have; three runs of ten the higher."""
    return [100 + 10.0 * (source.random() < 0.3) for _ in range(count)]


def false_alarms(noise: Series, series: int, source: random.Random) -> tuple[float, float]:
    """Shares of series with a false alarm at the last run, and at any run."""
    last = ever = 0
    for _ in range(series):
        values = noise(source, RUNS)
        ends = range(MIN_HISTORY, RUNS + 1)
        alarms = [find_change(values[:end]) is not None for end in ends]
        last += alarms[-1]
        ever += any(alarms)
    return last / series, ever / series


def found_within(before: int, series: int, source: random.Random) -> tuple[float, float]:
    """Shares of steps after `before` runs that are found within 5 and within 10 runs."""
    delays = []
    for _ in range(series):
        values = normal(source, before) + [value + 3 for value in normal(source, 10)]
        found = (
            end - before
            for end in range(before + MIN_VALUES, len(values) + 1)
            if abs((find_change(values[:end]) or -9) - before) <= 2
        )
        delays.append(next(found, RUNS))
    return sum(d <= 5 for d in delays) / series, sum(d <= 10 for d in delays) / series


def compare_alarms(noise: Series, cases: int, trials: int, source: random.Random) -> float:
    """Share of comparisons of equal runs in which a case is taken for slower."""
    alarms = 0
    for _ in range(trials):
        runs = noise(source, 6 * cases)
        far = [a - b for a, b in zip(runs[::2], runs[1::2], strict=True)]
        _, least = noise_of([abs(distance) for distance in far[cases:]], FALSE_ALARMS / cases)
        alarms += max(far[:cases]) > least
    return alarms / trials


def main(series: int = 200) -> None:
    """Print the shares."""
    print(f"{series} series each, seed 1\n\nnoise    false alarm: last   ever")
    for noise in (normal, laplace, odd, alike, two_hosts, two_levels):
        last, ever = false_alarms(noise, series, random.Random(1))
        print(f"{noise.__name__:<20} {last:7.2%} {ever:7.2%}", flush=True)
    print("\nruns before   found within 5   10 runs")
    for before in (15, 30, 55):
        five, ten = found_within(before, series, random.Random(1))
        print(f"{before:<13} {five:14.1%} {ten:9.1%}")
    print("\ncompare: noise      1 case   10 cases   100 cases")
    for noise in (normal, laplace, odd):
        shares = (compare_alarms(noise, n, 20 * series, random.Random(1)) for n in (1, 10, 100))
        print(f"{noise.__name__:<16}" + "".join(f"{share:10.2%}" for share in shares), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
