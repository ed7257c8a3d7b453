"""Tables of the history and of comparisons, for terminals of 80 columns and more."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.text import Text

from harness.checks.evidence import count
from harness.display import cell, plain_table
from harness.history import CaseTrend, Comparison, Flaky, Night
from harness.history.comparison import CaseChange, Delta, open_cases
from harness.history.trend import Shift
from harness.progress import COLOURS
from harness.records import OUTCOMES

WIDE_COLUMNS = 100
MIB = 1 << 20
_METRICS = {
    "step_s": "step time", "peak_bytes": "peak memory", "startup_s": "start-up",
    "step_ratio": "step time over the reference's",
}  # fmt: skip


def print_scenarios(console: Console, scenarios: dict[str, tuple[CaseTrend, ...]]) -> None:
    """A line a scenario: nights, the last answers, failing cases, changed values."""
    table = plain_table("scenario", "nights", "last night", "cases now", "shifts")
    for name, trends in scenarios.items():
        last = max((trend.nights[-1] for trend in trends), key=lambda night: night.created)
        counts = Counter(trend.nights[-1].outcome for trend in trends)
        words = ", ".join(f"{counts[o]} {o}" for o in OUTCOMES if counts[o])
        nights = {night.folder for trend in trends for night in trend.nights}
        shifts = sum(len(trend.shifts) for trend in trends)
        table.add_row(
            cell(name), cell(len(nights)), cell(when(last)), cell(words), cell(shifts or "")
        )
    console.print(table)


def print_cases_of(console: Console, scenario: str, trends: Sequence[CaseTrend]) -> None:
    """A line a case, those that fail first: since when, the last good commit, current values."""
    console.print(cell(f"{scenario}: {count(len(trends), 'case')}", "bold"))
    wide = console.width >= WIDE_COLUMNS
    table = plain_table(
        "case", "nights", "now", "bad since", "last good", *(["step", "peak"] if wide else []),
        "shifts",
    )  # fmt: skip
    for trend in sorted(trends, key=lambda trend: (trend.first_bad is None, trend.case_id)):
        last = trend.nights[-1]
        bad, good = trend.first_bad, trend.last_good
        values = [cell(seconds(last.step_s)), cell(mebibytes(last.peak_bytes))] if wide else []
        table.add_row(
            cell(trend.case_id),
            cell(trend.num_nights),
            cell(f"{last.outcome} {last.what}".strip(), COLOURS[last.outcome]),
            cell(when(bad) if bad else ""),
            cell(commit_of(good) if good else "never"),
            *values,
            cell(", ".join(_shift_word(shift) for shift in trend.shifts)),
        )
    console.print(table)


def print_case_trend(console: Console, trend: CaseTrend, *, num_nights: int) -> None:
    """One case night by night, the newest last; then changes, series and the turning point."""
    wide = console.width >= WIDE_COLUMNS
    console.print(
        cell(f"{trend.case_id}  ({trend.scenario}): {count(trend.num_nights, 'night')}", "bold")
    )
    table = plain_table(
        "night", "commit", "outcome", "step", "peak", *(["start-up"] if wide else []), "in"
    )
    for night in trend.nights[-num_nights:]:
        attempt = f" (attempt {night.attempt + 1})" if night.attempt else ""
        if night.retried:
            attempt += f" (after {', '.join(night.retried)})"
        table.add_row(
            cell(when(night)),
            cell(commit_of(night)),
            cell(f"{night.outcome} {night.what}".strip() + attempt, COLOURS[night.outcome]),
            cell(seconds(night.step_s)),
            cell(mebibytes(night.peak_bytes)),
            *([cell(seconds(night.startup_s))] if wide else []),
            cell(night.series),
        )
    console.print(table)
    if (hidden := len(trend.nights) - num_nights) > 0:
        console.print(cell(f"{hidden} earlier answers are not shown", "dim"))
    for letter, words in trend.series.items():
        if words:
            console.print(cell(f"{letter} is not compared with the series before it: {words}"))
    for shift in trend.shifts:
        console.print(shift_text(shift))
    for metric, noise in trend.noise.items():
        console.print(cell(f"{_METRICS[metric]} varies by {noise:.2%} from night to night", "dim"))
    console.print(turning_point(trend))


def shift_text(shift: Shift) -> Text:
    """A lasting change in one sentence."""
    change, form = shift.change, _FORMS.get(shift.metric, seconds)
    style = "red" if change.ratio > 0 else "green"
    return cell(
        f"{_METRICS[shift.metric]} {change.ratio:+.1%} since {when(shift.first)} "
        f"(series {shift.series}): {form(change.before)} became {form(change.after)}, noise "
        f"{change.noise:.2%}, between {commit_of(shift.last_before)} and {commit_of(shift.first)}",
        style,
    )


def turning_point(trend: CaseTrend) -> Text:
    """Since when it fails, and after which commit; or that it does not, as far as is known."""
    bad, good, last = trend.first_bad, trend.last_good, trend.nights[-1]
    if bad is None and good is None:
        return cell("no verdict in these nights", "yellow")
    if bad is None:
        assert good is not None
        if last.outcome == "passed":
            return cell("it does not fail now", "green")
        return cell(f"no verdict since it passed, {when(good)} at {commit_of(good)}", "yellow")
    since = f"first bad night {when(bad)} at {commit_of(bad)}"
    if good is None:
        return cell(f"{since}, or earlier: no pass in these nights", COLOURS["failed"])
    words = f"{since}, last good {when(good)} at {commit_of(good)}"
    if good.commit and good.commit == bad.commit:
        words += ": the same commit, so see --flaky and what the machine did"
    return cell(words, COLOURS["failed"])


def print_flaky(console: Console, found: Sequence[Flaky]) -> None:
    """Cases whose verdict changed by itself, or that the machine failed first, worst first."""
    if not found:
        console.print(cell(
            "no verdict changed without a change of commit or environment, and none took more than "
            "one attempt"
        ))  # fmt: skip
        return
    table = plain_table(
        "case", "changed", "of repeats", "rate", "95 %", "verdicts", "retried", "last"
    )
    for entry in found:
        table.add_row(
            cell(f"{entry.scenario}/{entry.case_id}"),
            cell(entry.changes),
            cell(entry.repeats),
            cell(f"{entry.rate:.1%}"),
            cell(f"{entry.low:.1%} to {entry.high:.1%}"),
            cell(", ".join(entry.verdicts)),
            cell(", ".join(f"{count} x {name}" for name, count in entry.retried.items())),
            cell(when(entry.last)),
        )
    console.print(table)


def print_comparison(console: Console, done: Comparison) -> None:
    """Environment first, then cases that differ, then counts."""
    for name, folder in (("before", done.before), ("after", done.after)):
        shard = f"  shard {folder.shard}" * bool(folder.shard)
        words = f"{name:<7} {folder.scenario}  {folder.created}  {short(folder.commit)}{shard}"
        console.print(cell(words, "bold"))
        if missing := open_cases(folder):
            console.print(cell(f"{name}: {count(missing, 'case')} without an answer", "yellow"))
    if done.environment:
        table = plain_table("environment", "before", "after")
        for change in done.environment:
            table.add_row(cell(change.name), cell(change.before), cell(change.after))
        console.print(table)
    else:
        console.print(cell("environment: the same"))
    told = [case for case in done.cases if case.differs]
    if told:
        console.print(_changes_table(console, told))
    for metric, noise in done.noise.items():
        console.print(cell(f"noise of {_METRICS[metric]}: {noise:.2%} (reference, control)", "dim"))
    console.print(counts_of(done.cases))


def _changes_table(console: Console, cases: Iterable[CaseChange]) -> object:
    wide = console.width >= WIDE_COLUMNS
    table = plain_table(
        "case", "before", "after", *(["step", "peak"] if wide else []), "what to look at"
    )
    for case in sorted(cases, key=lambda case: not case.worse):
        deltas = {delta.metric: delta for delta in case.deltas}
        values = [cell(delta_word(deltas.get(name))) for name in ("step_s", "peak_bytes")]
        better = [
            f"{_METRICS[delta.metric]} fell by {-delta.ratio:.1%}"
            for delta in case.deltas
            if delta.change == "better"
        ]
        words = [*case.worse, *better]
        if case.incomparable:
            words.append(f"incomparable: {case.incomparable}")
        table.add_row(
            cell(case.case_id),
            cell(case.before or "absent"),
            cell(case.after or "absent"),
            *(values if wide else []),
            cell("; ".join(words), "red" if case.worse else ""),
        )
    return table


def delta_word(delta: Delta | None) -> str:
    """'+3.1% ±0.4%', and whether it was too noisy to judge."""
    if delta is None:
        return ""
    noisy = " noisy" if delta.change == "noisy" else ""
    return f"{delta.ratio:+.1%} ±{delta.noise:.1%}{noisy}"


def counts_of(cases: Sequence[CaseChange]) -> Text:
    """'12 cases: 1 worse, 2 incomparable, 1 added, 8 alike'."""
    counts = {
        "worse": sum(bool(case.worse) for case in cases),
        "incomparable": sum(bool(case.incomparable) for case in cases),
        "added": sum(case.presence == "added" for case in cases),
        "removed": sum(case.presence == "removed" for case in cases),
        "with values too noisy to judge": sum(
            any(delta.change == "noisy" for delta in case.deltas) for case in cases
        ),
        "otherwise not alike": sum(
            case.differs and case.presence == "both" and not (case.worse or case.incomparable)
            for case in cases
        ),
        "alike": sum(not case.differs for case in cases),
    }
    words = ", ".join(f"{number} {word}" for word, number in counts.items() if number)
    return cell(f"{count(len(cases), 'case')}: {words or 'nothing to compare'}")


def when(night: Night) -> str:
    """'2031-02-03 04:05' in UTC."""
    return night.created[:16].replace("T", " ") or "unknown"


def commit_of(night: Night) -> str:
    """The commit of a night, short."""
    return short(night.commit)


def short(commit: str) -> str:
    """'3f1c0a9d', with '+5d0e' if there were changes on top."""
    base, _, changes = commit.partition("+")
    return f"{base[:8]}{'+' if changes else ''}{changes[:4]}" if base else "unknown"


def seconds(value: float | None) -> str:
    """'12.30 ms' or '1.50 s'."""
    if value is None:
        return ""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"


def mebibytes(value: float | None) -> str:
    """'40.0 MiB'."""
    return "" if value is None else f"{value / MIB:.1f} MiB"


def times(value: float | None) -> str:
    """'1.250 times'."""
    return "" if value is None else f"{value:.3f} times"


_FORMS: dict[str, Callable[[float | None], str]] = {"peak_bytes": mebibytes, "step_ratio": times}


def _shift_word(shift: Shift) -> str:
    return f"{_METRICS[shift.metric]} {shift.change.ratio:+.1%}"
