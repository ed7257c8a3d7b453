"""What the history says of the cases of a report: outcomes, values, since when one fails.

Only runs up to the report's own are looked at, so that a report made again says the same.
"""

from dataclasses import dataclass
from pathlib import Path

from harness.checks.evidence import count
from harness.errors import HarnessError
from harness.history import CaseTrend, Flaky, History, flaky_cases, trends
from harness.history.trend import shift_text, turning_point
from harness.records import Outcome
from reports.text import one_line

MAX_RUNS = 14
"""Runs of a strip and of a sparkline: two weeks of nightly runs say whether it is new."""
MOST_DAYS, MOST_ANSWERS = 60, 14_000
"""That are looked at for lasting changes: days, and answers of all cases, which take seconds."""
LETTERS: dict[Outcome, str] = {
    "passed": "p", "failed": "f", "error": "e", "incomparable": "i", "skipped": "s",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CasePast:
    """One case over the last runs, oldest first."""

    letters: str  # one an outcome, see `LETTERS`
    step_us: tuple[int | None, ...]  # None where nothing was measured
    peak_kib: tuple[int | None, ...]
    words: tuple[str, ...]  # since when it fails, lasting changes, what the machine failed


@dataclass(frozen=True, kw_only=True)
class Past:
    """The history of a report's cases; `note` says why it cannot be read, "" if it can."""

    cases: dict[str, CasePast]
    flaky: tuple[Flaky, ...]
    note: str = ""


NOTHING = Past(cases={}, flaky=())


def look_back(place: Path, scenario: str, created: str, num_cases: int) -> Past:
    """The last runs of a scenario's cases, up to when a folder of so many was `created`."""
    if not place.exists():
        return NOTHING
    days = min(MOST_DAYS, max(MAX_RUNS, MOST_ANSWERS // max(1, num_cases)))
    try:
        found = trends(History.open(place), scenario, days=days, until=created)
    except HarnessError as error:
        return Past(cases={}, flaky=(), note=one_line(f"no history is shown: {error}"))
    cases = {trend.case_id: _case(trend) for trend in found}
    return Past(cases=cases, flaky=flaky_cases(found))


def _case(trend: CaseTrend) -> CasePast:
    answers = trend.answers[-MAX_RUNS:]
    words = [turning_point(trend)[0]] * (trend.first_bad is not None)
    words += map(shift_text, trend.shifts)
    if again := [answer for answer in answers if answer.retried]:
        tried = ", ".join(again[-1].retried)
        words.append(f"tried again in {count(len(again), 'run')}: {tried}")
    steps, peaks = ([getattr(a, name) for a in answers] for name in ("step_s", "peak_bytes"))
    return CasePast(
        letters="".join(LETTERS[answer.outcome] for answer in answers),
        step_us=tuple(None if step is None else round(step * 1e6) for step in steps),
        peak_kib=tuple(None if peak is None else round(peak / 1024) for peak in peaks),
        words=tuple(one_line(text, 300) for text in words),
    )
