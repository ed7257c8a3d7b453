"""What the history says of the cases of a report: a strip of answers, values, since when it fails.

Only nights up to the report's own are looked at, so that a report made again says the same. All of
it varies with the history, not with the run: `normalise` takes it away.
"""

from dataclasses import dataclass
from pathlib import Path

from harness.errors import HarnessError
from harness.history import DATABASE_FILE, CaseTrend, Flaky, History, flaky_cases, trends
from harness.history.trend import METRIC_NAMES, Shift
from harness.records import Outcome
from reports.text import one_line

MAX_NIGHTS = 14
"""Nights of a strip and of a sparkline: two weeks say whether it is new."""
MOST_DAYS = 60
"""Days that are looked at for lasting changes, of which none is told from two weeks alone."""
MOST_ANSWERS = 14_000
"""Of all cases and days that are looked at, but for two weeks of each case: some seconds."""
LETTERS: dict[Outcome, str] = {
    "passed": "p", "failed": "f", "error": "e", "incomparable": "i", "skipped": "s",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CaseNights:
    """One case over the last nights, oldest first.

    Attributes:
        trend: everything known of it.
        letters: a letter an answer, see `LETTERS`.
        step_us: step time in microseconds, None where nothing was measured.
        peak_kib: peak memory in KiB.
        words: since when it fails, lasting changes, attempts that the machine failed.
    """

    trend: CaseTrend
    letters: str
    step_us: tuple[int | None, ...]
    peak_kib: tuple[int | None, ...]
    words: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Nights:
    """The history beside a report; `note` says why there is none, "" if there simply is none."""

    cases: dict[str, CaseNights]
    flaky: tuple[Flaky, ...]
    note: str = ""


NOTHING = Nights(cases={}, flaky=())


def look_back(folder: Path, scenario: str, created: str, database: Path | None = None) -> Nights:
    """The last nights of every case of a scenario; raises nothing.

    Args:
        folder: the run folder that is reported.
        scenario: its name, as the history knows it.
        created: when the folder was made: later nights are left out.
        database: of the history; None for the one beside the folder, if there is one.
    """
    place = database or folder.parent / DATABASE_FILE
    if not place.is_file():
        return NOTHING
    try:
        with History.open(place) as history:
            days = _days(history, scenario)
            found = trends(history, scenario, days=days, until=created)
    except HarnessError as error:
        return Nights(cases={}, flaky=(), note=one_line(f"no history is shown: {error}"))
    cases = {trend.case_id: _case(trend, days) for trend in found}
    return Nights(cases=cases, flaky=flaky_cases(found))


def _days(history: History, scenario: str) -> int:
    sql = "SELECT MAX(num_cases) FROM folders WHERE scenario = ? AND typeof(num_cases) = 'integer'"
    (row,) = history.query(sql, [scenario])
    return min(MOST_DAYS, max(MAX_NIGHTS, MOST_ANSWERS // max(1, row[0] or 0)))


def _case(trend: CaseTrend, days: int) -> CaseNights:
    answers = trend.answers[-MAX_NIGHTS:]
    words = [shift_words(shift) for shift in trend.shifts]
    if trend.first_bad is not None:
        good = trend.last_good
        before = f"last good {good.created[:10]} at {_commit(good.commit)}" if good else (
            f"no pass in the last {days} days"
        )  # fmt: skip
        bad = trend.first_bad
        words.insert(0, f"first bad {bad.created[:10]} at {_commit(bad.commit)}, {before}")
    again = [answer for answer in answers if answer.retried]
    if again:
        noun = "run" if len(again) == 1 else "runs"
        words.append(f"tried again in {len(again)} {noun}: {', '.join(again[-1].retried)}")
    return CaseNights(
        trend=trend,
        letters="".join(LETTERS[answer.outcome] for answer in answers),
        step_us=tuple(_scaled(answer.step_s, 1e6) for answer in answers),
        peak_kib=tuple(_scaled(answer.peak_bytes, 1 / 1024) for answer in answers),
        words=tuple(one_line(text, 300) for text in words),
    )


def shift_words(shift: Shift) -> str:
    """A lasting change in one clause."""
    return (
        f"{METRIC_NAMES[shift.metric]} {shift.change.ratio:+.1%} since {shift.first.created[:10]} "
        f"at {_commit(shift.first.commit)}"
    )


def _scaled(value: float | None, unit: float) -> int | None:
    return None if value is None else round(value * unit)


def _commit(commit: str) -> str:
    return one_line(commit, 60)[:12] or "an unknown commit"
