"""Contracts of harness.bisect.least."""

import math

import pytest

from harness.bisect.least import first_failing


@pytest.mark.parametrize("values", [range(5), range(5, 0, -1), range(4), range(1), range(0)])
def test_the_first_value_that_fails_is_found(values: range) -> None:
    """Wherever it is, in either direction; where all pass, there is none."""
    for number in range(len(values)):
        failing = set(values[number:])
        assert first_failing(values, failing.__contains__) == values[number]
    assert first_failing(values, lambda _: False) is None


def test_few_are_asked_and_none_twice() -> None:
    """The first, then log2 of them; the answer was seen to fail, and the one before it to pass."""
    for number in range(1000):
        asked: list[int] = []

        def fails(value: int, number: int = number, asked: list[int] = asked) -> bool:
            asked.append(value)
            return value >= number

        assert first_failing(range(1000), fails) == number
        assert len(set(asked)) == len(asked) <= 1 + math.ceil(math.log2(1000))
        assert asked[0] == 0
        assert {number, max(number - 1, 0)} <= set(asked)
