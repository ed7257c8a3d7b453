"""Contracts of the picture of a case across nights: every fact is in it as text."""

import base64
import dataclasses
import datetime
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from harness.history import Answer, CaseTrend
from harness.history.trend import Change, Shift
from reports.trends import day_of, trend_figure

FIRST = datetime.datetime(2031, 1, 1, 3, tzinfo=datetime.UTC)


def one(number: int, **changes: Any) -> Answer:
    facts: dict[str, Any] = {
        "folder": str(number), "commit": "c", "attempt": 0, "outcome": "passed", "what": "",
        "created": (FIRST + datetime.timedelta(days=number)).isoformat(), "message": "",
        "environment": "e", "series": "A", "step_s": 0.02, "peak_bytes": float(40 << 20),
        "startup_s": 1.0,
    }  # fmt: skip
    return Answer(**(facts | changes))


def trend(*nights: Answer, shifts: tuple[Shift, ...] = ()) -> CaseTrend:
    return CaseTrend(
        scenario="s", case_id="c", answers=nights, first_bad=None, last_good=None, shifts=shifts,
        noise={}, series={},
    )  # fmt: skip


def words(uri: str) -> str:
    kind, _, data = uri.partition(",")
    assert kind == "data:image/svg+xml;base64"
    return " ".join(ET.fromstring(base64.b64decode(data).decode()).itertext())


def test_series_changes_and_answers_are_told() -> None:
    """Series by letter, a change by its size, each outcome by a word and a symbol."""
    nights = [one(n, series="A" if n < 8 else "B") for n in range(16)]
    nights[9] = dataclasses.replace(nights[9], outcome="failed", what="diverged")
    nights[3] = one(3, outcome="error", series="", step_s=0.5, peak_bytes=None, startup_s=None)
    change = Change(at=4, before=0.02, after=0.0206, noise=0.01, z=6.0)
    shift = Shift(
        metric="step_s", series="B", change=change, first=nights[12], last_before=nights[11]
    )
    told = words(trend_figure(trend(*nights, shifts=(shift,))))
    for word in ("step, ms", "peak, MiB", "start-up, s", "A", "B", "not comparable", "+3.0%",
                 "✓ passed", "✗ failed", "! error"):  # fmt: skip
        assert word in told


def test_the_same_trend_is_the_same_picture() -> None:
    """No time of drawing and no random name is in it."""
    case = trend(*(one(n) for n in range(5)))
    assert trend_figure(case) == trend_figure(case)


@pytest.mark.parametrize(
    "nights",
    [(), (one(0),), (one(0, step_s=None, peak_bytes=None, startup_s=None),),
     (one(0, created="yesterday"), one(1, created="")),
     (one(0, step_s=0.0, peak_bytes=0.0), one(0, step_s=1e9))],
    ids=["none", "one", "not measured", "no dates", "extremes"],
)  # fmt: skip
def test_any_trend_is_drawn(nights: tuple[Answer, ...]) -> None:
    """Of nothing, of one night, without values or dates, of extremes: a picture all the same."""
    told = words(trend_figure(trend(*nights)))
    measured = any(day_of(night) and night.step_s is not None for night in nights)
    assert ("not measured" in told) == (not measured)


def test_a_night_without_a_zone_is_in_utc() -> None:
    """A time that names no zone is taken for UTC; what is no time has no place."""
    assert day_of(one(0)) == day_of(one(0, created="2031-01-01T03:00:00"))
    assert day_of(one(0, created="2031-01-01T04:00:00+01:00")) == day_of(one(0))
    assert day_of(one(0, created="x")) is None
