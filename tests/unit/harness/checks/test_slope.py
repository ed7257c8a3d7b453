"""Does memory grow: leaks are found, and nothing that stays bounded is taken for one."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checks.soak import LEVEL, WINDOWS, chance_of_trend, slope_of, theil_sen, without_jumps
from harness.soaking import LEAST_STEPS

KIB, MIB = 1 << 10, 1 << 20
STEPS = st.integers(LEAST_STEPS, 600)


def spaced(number: int) -> list[float]:
    """Values in [0, 1) that look like noise: multiples of the golden ratio's fraction."""
    return [(n * 0.6180339887) % 1 for n in range(number)]


@given(steps=STEPS, level=st.integers(0, 1 << 36), swing=st.integers(0, 500 * KIB))
def test_a_leak_of_64_kib_a_step_is_found(steps: int, level: int, swing: int) -> None:
    """In every run that is long enough, whatever else is held, under noise of some steps' leak."""
    series = [level + 64 * KIB * n + swing * x for n, x in enumerate(spaced(steps))]
    slope = slope_of(series)
    assert slope.grows()
    assert slope.bytes_per_step == pytest.approx(64 * KIB, rel=0.5)
    assert not slope.grows(limit=128 * KIB)


@given(steps=STEPS, level=st.integers(0, 1 << 36))
def test_a_steady_leak_is_told_to_the_byte(steps: int, level: int) -> None:
    """However many steps the windows have left over."""
    assert slope_of([level + 64 * KIB * n for n in range(steps)]).bytes_per_step == 64 * KIB


def test_a_leak_is_found_behind_a_warm_up_and_in_every_nth_step() -> None:
    """Captures that hold much at first, a leak once in 20 steps, memory given back in between."""
    leak = [64 * KIB * n for n in range(2000)]
    warm = [leak[n] + 500 * MIB * (n < 400) for n in range(2000)]
    rare = [20 * 64 * KIB * (n // 20) for n in range(2000)]
    saw = [leak[n] + 16 * MIB * (n % 37) / 37 for n in range(2000)]
    for series in (warm, rare, saw):
        assert slope_of(series).grows()


@given(
    steps=STEPS,
    period=st.floats(0.001, 0.5),
    phase=st.floats(0, 1),
    height=st.integers(1, 1 << 34),
)
def test_a_sawtooth_is_no_leak(steps: int, period: float, phase: float, height: int) -> None:
    """Memory that is kept for up to half of the run and then given back, at any phase."""
    # Seen once a step, a shorter one looks like one that is longer than the run.
    length = max(period * steps, 2.0)
    assert not slope_of([height * ((n / length + phase) % 1) for n in range(steps)]).grows()


@given(steps=STEPS, places=st.lists(st.floats(0, 1), max_size=6), height=st.integers(1, 1 << 34))
def test_stairs_are_no_leak(steps: int, places: list[float], height: int) -> None:
    """A plateau, or some allocations that stay, wherever they come in the run."""
    assert not slope_of(
        [height * sum(n >= p * steps for p in places) for n in range(steps)]
    ).grows()


def test_stairs_under_noise_are_no_leak() -> None:
    """A few allocations that stay, in memory that swings: increments rise half the time by luck."""
    alarms = 0
    for seed in range(60):
        drawn = random.Random(seed)
        places = [drawn.randrange(1000) for _ in range(drawn.randint(1, 6))]
        series = [
            64 * MIB * sum(n >= at for at in places) + drawn.uniform(0, MIB) for n in range(1000)
        ]
        alarms += slope_of(series).grows()
    assert alarms == 0


def test_a_leak_is_found_beside_allocations_that_stay() -> None:
    """Jumps are taken off, the leak is not."""
    for at in range(0, 2000, 100):
        series = [64 * KIB * n + 256 * MIB * (n >= at) for n in range(2000)]
        assert slope_of(series).grows(), at
        assert slope_of(series).bytes_per_step == pytest.approx(64 * KIB, rel=0.01)


@given(steps=STEPS, constant=st.floats(0.001, 0.25), height=st.integers(1, 1 << 34))
def test_what_fills_up_is_no_leak(steps: int, constant: float, height: int) -> None:
    """A warm-up that slows down, with a time constant of up to a quarter of the run."""
    series = [height * (1 - math.exp(-n / (constant * steps))) for n in range(steps)]
    assert not slope_of(series).grows()


@given(st.lists(st.integers(0, 1 << 40), min_size=LEAST_STEPS, max_size=80))
def test_constant_and_falling_memory_are_no_leak(values: list[int]) -> None:
    """Sorted downwards nothing grows, nor if all is constant."""
    assert not slope_of(sorted(values, reverse=True)).grows()
    assert not slope_of([values[0]] * len(values)).grows()


def test_the_chance_is_that_of_all_orders() -> None:
    """Counted over every order of six values, and one in n! for the rising one of sixteen."""
    orders = list(itertools.permutations(range(6)))
    chances = [chance_of_trend(order) for order in orders]
    for level in (1 / 720, 0.01, 0.05, 0.3, 1.0):
        share = sum(chance <= level for chance in chances) / len(orders)
        assert share <= level + 1e-12
    for order in orders[:: len(orders) // 7]:
        reached = sum(chance <= chance_of_trend(order) for chance in chances) / len(orders)
        assert chance_of_trend(order) == pytest.approx(reached)
    rarest = 1 / math.factorial(WINDOWS)
    assert rarest < LEVEL
    assert chance_of_trend(range(WINDOWS)) == pytest.approx(rarest)
    assert chance_of_trend([7] * WINDOWS) > 0.4


def test_the_slope_is_the_median_of_all_pairs() -> None:
    """Of (0, 0), (1, 1), (2, 2), (4, 40): slopes 1, 1, 10, 1, 13, 19; and one bad value is one."""
    assert theil_sen((0, 1, 2, 4), (0, 1, 2, 40)) == 5.5
    assert theil_sen(range(5), (0, 2, 4, 1000, 8)) == 2


def test_a_jump_gives_way_to_the_usual_increment() -> None:
    """Increments of 1, 2, 3 and two jumps: 2 is usual, not the median of all, which jumps move."""
    assert without_jumps([0, 1, 3, 6, 106, 206]) == [0, 1, 3, 6, 8, 10]
    assert without_jumps([0, 1, 3, 6, -94]) == [0, 1, 3, 6, -94]


def test_too_short_a_series_is_refused() -> None:
    """Below two values a window there is nothing to test."""
    with pytest.raises(ValueError, match=r"Expected 64 values at least, got 63\."):
        slope_of([0] * (LEAST_STEPS - 1))
