"""The ruler of time limits."""

import time

import pytest

from tests import pace


def test_paces_are_work_over_the_pace_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that slows down slows the ruler too; the least of several runs counts."""
    clock = 0.0
    speed = iter([1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 1.0, 9.0, 1.0])  # of each piece, in order

    def take(seconds: float) -> None:
        nonlocal clock
        clock += seconds * next(speed)

    monkeypatch.setattr(time, "process_time", lambda: clock)
    monkeypatch.setattr(pace, "one_pace", lambda: take(0.1))
    ratios = [pace.in_paces(lambda: take(0.5), times=1) for _ in range(3)]
    assert ratios == pytest.approx([5.0, 5.0, 45.0])
    speed = iter([1.0, 9.0, 1.0, 1.0, 1.0, 1.0])
    assert pace.in_paces(lambda: take(0.5), times=2) == pytest.approx(5.0)
