"""Contracts of change points: what is planted is found in time, and noise is not."""

import random
from collections.abc import Callable
from statistics import median

import pytest

from harness.history.trend import MIN_HISTORY, MIN_VALUES, deviation, find_changes

NIGHTS = 60
SERIES = 200
Noise = Callable[[random.Random], float]


def gauss(source: random.Random) -> float:
    return source.gauss(0, 1)


def heavy(source: random.Random) -> float:
    """Normal, but one night in twenty is six times as far out."""
    return source.gauss(0, 6 if source.random() < 0.05 else 1)


def nights(seed: int, count: int = NIGHTS, noise: Noise = gauss) -> list[float]:
    """Values around 100 with a deviation of 1 %."""
    source = random.Random(seed)
    return [100 + noise(source) for _ in range(count)]


def test_noise_alone_is_no_change() -> None:
    """In 200 clean series of 60 nights, noise of 1 %, there is no false alarm at the last night."""
    assert [seed for seed in range(SERIES) if find_changes(nights(seed))] == []


def test_looking_every_night_seldom_finds_noise() -> None:
    """Of 60 clean series at most one gives a false alarm at any of 49 nights that are looked at."""
    alarms = 0
    for seed in range(SERIES, SERIES + 60):
        values = nights(seed)
        alarms += any(find_changes(values[:end]) for end in range(MIN_HISTORY, NIGHTS + 1))
    assert alarms <= 1


@pytest.mark.parametrize("sign", [1, -1])
def test_a_step_of_three_deviations_is_found_within_five_nights(sign: int) -> None:
    """A step of 3 % in noise of 1 %: 85 of 100 are placed within two nights by the fifth night,
    98 by the tenth."""
    found_at = []
    for seed in range(100):
        values = nights(seed, 65)
        values[55:] = [value + 3 * sign for value in values[55:]]
        ends = (
            end
            for end in range(55 + MIN_VALUES, 66)
            if any(abs(change.at - 55) <= 2 and change.ratio * sign > 0
                   for change in find_changes(values[:end]))
        )  # fmt: skip
        found_at.append(next(ends, 99) - 55)
    assert sum(nights <= 5 for nights in found_at) >= 85
    assert sum(nights <= 10 for nights in found_at) >= 98


def test_a_change_says_where_how_much_and_how_sure() -> None:
    """Place, levels and noise are those that were planted."""
    values = nights(1)
    values[40:] = [value * 1.1 for value in values[40:]]
    (change,) = find_changes(values)
    assert change.at == 40
    assert (change.before, change.after) == (median(values[:40]), median(values[40:]))
    assert change.ratio == pytest.approx(0.1, abs=0.01)
    assert change.noise == pytest.approx(0.01, rel=0.5)
    assert change.z > 5


def test_nights_that_resemble_each_other_are_less_evidence() -> None:
    """Of 60 series in which noise lasts (correlation 0.5), with no step, at most 1 in 12 alarms."""
    alarms = 0
    for seed in range(60):
        source, value, values = random.Random(seed), 0.0, list[float]()
        for _ in range(NIGHTS):
            value = 0.5 * value + source.gauss(0, 1)
            values.append(100 + value)
        alarms += bool(find_changes(values))
    assert alarms <= 5


def test_up_and_down_again_are_two_changes() -> None:
    """A regression that was mended stays visible."""
    values = nights(2)
    values[20:30] = [value + 6 for value in values[20:30]]
    assert [(c.at, round(c.ratio, 1)) for c in find_changes(values)] == [(20, 0.1), (30, -0.1)]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("place", [0, 25, 58])
def test_odd_nights_are_no_change(place: int, count: int) -> None:
    """One or two nights that are far out are noise, wherever they are."""
    for seed in range(10):
        values = nights(seed)
        values[place : place + count] = [180.0] * count
        assert find_changes(values) == ()


def test_equal_values_have_no_noise_and_still_change() -> None:
    """Memory that is the same every night changes on the third night of a new size, not before."""
    values = [float(40 << 20)] * 20
    assert find_changes(values) == ()
    for more in range(1, 5):
        grown = [*values, *[(40 << 20) * 1.01] * more]
        assert [change.at for change in find_changes(grown)] == ([20] if more >= 3 else [])
    slightly = [*values, *[(40 << 20) * 1.0001] * 30]
    assert find_changes(slightly) == ()


@pytest.mark.parametrize("values", [[], [1.0], [1.0] * (MIN_HISTORY - 1), [0.0] * 20])
def test_too_little_says_nothing(values: list[float]) -> None:
    """Before twelve nights nothing is told; zeros are no change."""
    assert find_changes(values) == ()


def test_the_deviation_is_blind_to_steps_and_outliers() -> None:
    """A step and a few odd nights leave the measured deviation within a third of the truth."""
    values = nights(3, 200, heavy)
    values[100:] = [value + 50 for value in values[100:]]
    assert deviation(values) == pytest.approx(1.0, rel=1 / 3)
