"""Contracts of harness.checks.speed."""

import itertools
import math
import random

import pytest

from harness.checks.speed import CONFIDENCE, LEAST_PAIRS, interval_of


@pytest.mark.parametrize(
    ("number", "left_out"), [(6, 0), (7, 2), (8, 3), (9, 5), (10, 8), (12, 13), (15, 25), (20, 52)]
)
def test_interval_leaves_out_what_the_published_table_says(number: int, left_out: int) -> None:
    """The critical values of the signed-rank test at two-sided 5 %, as books have them."""
    values = [2.0**index for index in range(number)]
    means = sorted((values[i] + values[j]) / 2 for i in range(number) for j in range(i, number))
    found = interval_of(values)
    assert (found.low, found.high) == (means[left_out], means[-1 - left_out])


def test_confidence_is_counted_exactly() -> None:
    """Over all signs of six magnitudes, all equally likely, 0 is missed as often as is said."""
    magnitudes = [1.0, 2.5, 3.0, 7.0, 11.0, 20.0]
    missed, found = 0, interval_of(magnitudes)
    for signs in itertools.product((-1, 1), repeat=6):
        found = interval_of([s * m for s, m in zip(signs, magnitudes, strict=True)])
        missed += not found.low <= 0 <= found.high
    assert missed == 2
    assert found.confidence == 1 - missed / 64 >= CONFIDENCE


def test_estimate_is_the_middle_of_all_means() -> None:
    """One wild pair moves the mean, not the estimate."""
    calm = [0.9, 1.0, 1.1, 1.0, 0.95, 1.05, 1.0]
    assert interval_of([*calm, 50.0]).estimate == pytest.approx(1.0, abs=0.06)


def test_order_and_sign_do_not_matter() -> None:
    """Shuffled pairs give the same answer, exchanged legs the mirrored one, bit for bit."""
    draw = random.Random(1)
    values = [draw.gauss(0, 1) for _ in range(9)]
    found = interval_of(values)
    assert interval_of(sorted(values)) == found
    mirrored = interval_of([-value for value in values])
    assert (mirrored.low, mirrored.estimate, mirrored.high) == (
        -found.high, -found.estimate, -found.low,
    )  # fmt: skip


@pytest.mark.parametrize(
    "values", [[0.0] * (LEAST_PAIRS - 1), [0.0] * 6 + [math.nan], [math.inf] * 6]
)
def test_refuses_what_has_no_interval(values: list[float]) -> None:
    """Too few pairs, or one that is no number."""
    with pytest.raises(ValueError, match="Expected"):
        interval_of(values)
