"""One case over its runs as a picture: answers, values, lasting changes.

Three rows over one axis of time: step time, peak memory, start-up. Values are joined only within
a series, for across series nothing may be compared; a lasting change is a line with its size; an
answer that is not a pass has a mark of its own under the values.
"""

from datetime import UTC, datetime
from typing import Any

from matplotlib import dates
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from harness.history import Answer, CaseTrend
from harness.history.trend import Shift
from reports.figures import FAINT, INK, LEFT, MIB, OUTCOME_COLOURS, RIGHT, data_uri, style
from reports.report import SYMBOLS

ROWS: dict[str, tuple[str, float]] = {
    "step_s": ("step, ms", 1e-3),
    "peak_bytes": ("peak, MiB", float(MIB)),
    "startup_s": ("start-up, s", 1.0),
}
_DATES: Any = dates  # parts of it are not typed
MARKERS = ("o", "s", "^", "D", "v", "P")
MAX_MARKED = 120


def trend_figure(trend: CaseTrend) -> str:
    """The picture as a data URI; the same bytes for the same trend.

    Args:
        trend: with any number of answers, none included.
    """
    answers = [answer for answer in trend.answers if day_of(answer) is not None]
    with style():
        figure = Figure(figsize=(6.4, 4.8))
        figure.subplots_adjust(left=0.13, right=0.97, top=0.95, bottom=0.14, hspace=0.25)
        rows = figure.subplots(len(ROWS) + 1, 1, sharex=True, height_ratios=[3, 3, 3, 1])
        for axes, (metric, (label, unit)) in zip(rows, ROWS.items(), strict=False):
            _values(axes, answers, metric, unit)
            for shift in trend.shifts:
                if shift.metric == metric:
                    _shift(axes, shift)
            axes.set_ylabel(label)
            axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
        _answers(rows[-1], answers)
        locator = _DATES.AutoDateLocator(minticks=2, maxticks=8, tz=UTC)
        rows[-1].xaxis.set_major_locator(locator)
        rows[-1].xaxis.set_major_formatter(_DATES.ConciseDateFormatter(locator, tz=UTC))
        return data_uri(figure)


def day_of(answer: Answer) -> float | None:
    """An answer's time as Matplotlib counts days; None if it has none that can be read."""
    try:
        created = datetime.fromisoformat(answer.created)
    except ValueError:
        return None
    aware = created if created.tzinfo is not None else created.replace(tzinfo=UTC)
    return float(_DATES.date2num(aware))


def _values(axes: Axes, answers: list[Answer], metric: str, unit: float) -> None:
    held = [answer for answer in answers if getattr(answer, metric) is not None]
    if not held:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center")
        axes.set_yticks([])
        return
    names = dict.fromkeys(answer.series for answer in held)
    for place, series in enumerate(names):
        own = [answer for answer in held if answer.series == series]
        axes.plot(
            [day_of(answer) or 0.0 for answer in own],
            [getattr(answer, metric) / unit for answer in own],
            color=(LEFT, RIGHT, INK)[place % 3],
            # What is in no series may not even be compared with its neighbour.
            ls="-" if series else "", lw=1.2,
            marker=MARKERS[place % len(MARKERS)] if len(own) <= MAX_MARKED else "", ms=3.5,
            label=series or "not comparable",
        )  # fmt: skip
    if len(names) > 1:
        axes.legend(loc="upper left", ncols=len(names), fontsize=8)
    # From a little below the lowest: a change of 3 % must be seen.
    low, high = axes.get_ylim()
    room = max((high - low) * 0.15, abs(high) * 0.01)
    axes.set_ylim(low - room, high + room)


def _shift(axes: Axes, shift: Shift) -> None:
    day = day_of(shift.first)
    if day is None:
        return
    axes.axvline(day, color=RIGHT, lw=1, ls=":")
    axes.annotate(
        f"{shift.change.ratio:+.1%}", (day, 1), xycoords=("data", "axes fraction"),
        xytext=(3, -3), textcoords="offset points", va="top", fontsize=8, color=RIGHT,
    )  # fmt: skip


def _answers(axes: Axes, answers: list[Answer]) -> None:
    """A mark and a symbol for every answer: colour alone tells nothing."""
    axes.set_yticks([])
    axes.set_ylim(0, 1)
    axes.grid(visible=False)
    for outcome in dict.fromkeys(answer.outcome for answer in answers):
        days = [day_of(answer) or 0.0 for answer in answers if answer.outcome == outcome]
        axes.vlines(
            days, 0, 0.35 if outcome == "passed" else 1.0,
            color=OUTCOME_COLOURS[outcome] if outcome != "skipped" else FAINT, lw=2.5,
            label=f"{SYMBOLS[outcome]} {outcome}",
        )  # fmt: skip
    if answers:
        axes.legend(
            loc="upper left", bbox_to_anchor=(0, -0.75), ncols=5, fontsize=8, handlelength=0.8
        )
