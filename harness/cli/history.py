"""The commands `harness history` and `harness compare`, and their tables."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.checks.evidence import count
from harness.errors import NothingSelected, UsageError, did_you_mean, shown
from harness.history import (
    DATABASE_FILE,
    Answer,
    CaseTrend,
    Comparison,
    Flaky,
    History,
    Recorded,
    compare,
    flaky_cases,
    gather,
    record_folder,
    trends,
)
from harness.history.entries import FolderEntry
from harness.history.ledger import open_import
from harness.history.trend import METRIC_NAMES, CaseChange, Delta, Shift, State, open_cases
from harness.records import OUTCOMES, ExitCode
from harness.store import RunFolder
from harness.store.verify import DEFAULT_OUT
from harness.terminal import COLOURS, cell, make_console, plain_table

_PATH = click.Path(path_type=Path)
_json = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON value on stdout; messages go to stderr."
)
_database = click.option(
    "--history", "database", type=_PATH, metavar="FILE",
    default=DEFAULT_OUT / DATABASE_FILE, show_default=True, help="History file.",
)  # fmt: skip
DEFAULT_DAYS = 60
MOST_ANSWERS = 60
"""Of one case: what a table shows of them."""
WIDE_COLUMNS = 100
MIB = 1 << 20


@click.command("history")
@click.argument("name", required=False, metavar="[CASE|SCENARIO]")
@_database
@click.option(
    "--days", type=click.IntRange(1), default=DEFAULT_DAYS, show_default=True,
    help="Show the last N days with runs.",
)  # fmt: skip
@click.option(
    "--flaky",
    is_flag=True,
    help="Show cases whose verdict changed without a change of code or packages.",
)
@click.option(
    "--add", "folders", type=_PATH, multiple=True, metavar="RUN", help="Record a run folder."
)
@click.option(
    "--import",
    "files",
    type=_PATH,
    multiple=True,
    metavar="FILE",
    help="Merge another history file into this one.",
)
@_json
def history_command(
    *, name: str | None, database: Path, days: int, flaky: bool, folders: tuple[Path, ...],
    files: tuple[Path, ...], as_json: bool,
) -> int:  # fmt: skip
    """What earlier runs say of a CASE or a SCENARIO, or of all of them.

    A case that two scenarios have is SCENARIO/CASE.
    """
    if folders or files:
        return _take_in(database, folders, files, as_json=as_json)
    with History.open(database) as history:
        _show(_chosen(history, name, days), name, flaky=flaky, as_json=as_json)
    return ExitCode.PASSED


def _take_in(
    database: Path, folders: Iterable[Path], files: Iterable[Path], *, as_json: bool
) -> int:
    added = Recorded()
    for folder in folders:
        added += record_folder(folder, database)
    for file in files:
        with open_import(file) as other, History.open(database, create=True) as history:
            added += history.merge(other)
    if as_json:
        click.echo(json.dumps(added.to_json()))
    else:
        differing = (
            f"; {added.differing} already recorded with different content were kept unchanged"
            if added.differing else ""
        )  # fmt: skip
        click.echo(
            f"{database}: {count(added.folders, 'run folder')}, {count(added.cases, 'answer')} and "
            f"{count(added.runs, 'attempt')} are new{differing}"
        )
    return ExitCode.PASSED


def _chosen(history: History, name: str | None, days: int) -> dict[str, tuple[CaseTrend, ...]]:
    """Trends by scenario: of all, of one, or of the cases that have this id."""
    rows = history.query(
        "SELECT DISTINCT folders.scenario, cases.case_id FROM cases JOIN folders "
        "ON cases.folder = folders.id ORDER BY 1, 2"
    )
    pairs = [(str(scenario), str(case)) for scenario, case in rows]
    if not pairs:
        raise NothingSelected(f"{history.path} holds no run yet")
    scenarios = list(dict.fromkeys(scenario for scenario, _ in pairs))
    if name is None or name in scenarios:
        wanted: list[tuple[str, str | None]] = [(s, None) for s in scenarios if name in (None, s)]
    else:
        wanted = [(s, c) for s, c in pairs if name in (c, f"{s}/{c}")]
    if not wanted:
        known = [*scenarios, *dict.fromkeys(case for _, case in pairs)]
        raise UsageError(
            f"{shown(str(name))}: expected a case or a scenario of {history.path}"
            f"{did_you_mean(str(name), known)}"
        )
    found = {scenario: trends(history, scenario, case, days=days) for scenario, case in wanted}
    kept = {scenario: cases for scenario, cases in found.items() if cases}
    if not kept:
        raise NothingSelected(f"no {shown(str(name))} in the last {days} days of the history")
    return kept


def _show(
    found: dict[str, tuple[CaseTrend, ...]], name: str | None, *, flaky: bool, as_json: bool
) -> None:
    everything = [trend for cases in found.values() for trend in cases]
    if as_json:
        entries = flaky_cases(everything) if flaky else everything
        click.echo(json.dumps([entry.to_json() for entry in entries], allow_nan=False))
        return
    console = make_console()
    if flaky:
        print_flaky(console, flaky_cases(everything))
    elif name is None:
        print_scenarios(console, found)
    elif name in found:
        print_cases_of(console, name, found[name])
    else:
        for trend in everything:
            print_case_trend(console, trend)


@click.command("compare")
@click.argument("before", metavar="RUN")
@click.argument("after", metavar="RUN")
@_database
@_json
def compare_command(*, before: str, after: str, database: Path, as_json: bool) -> int:
    """Compare two runs: environments first, then what is worse.

    RUN is a run folder, or the beginning of its id in the history.
    """
    done = compare(_entry(before, database), _entry(after, database))
    if as_json:
        plain: dict[str, Any] = done.to_json() | {"exit_code": int(done.exit_code)}
        for side in ("before", "after"):
            plain[side] = {k: v for k, v in plain[side].items() if k not in ("cases", "runs")}
        click.echo(json.dumps(plain, allow_nan=False))
    else:
        print_comparison(make_console(), done)
    return done.exit_code


def _entry(name: str, database: Path) -> FolderEntry:
    if Path(name).exists():
        return gather(RunFolder.open(Path(name)))
    found: list[FolderEntry] = []
    if name and database.exists():
        with History.open(database) as history:
            found = list(history.entries(name, most=2))
    if len(found) != 1:
        several = "several runs of" if found else "nothing, also in"
        raise UsageError(f"{shown(name)}: expected a run folder or an id, got {several} {database}")
    return found[0]


# --- tables -----------------------------------------------------------------------------------


def print_scenarios(console: Console, scenarios: dict[str, tuple[CaseTrend, ...]]) -> None:
    """A line a scenario: runs, the last answers, failing cases, changed values."""
    table = plain_table("scenario", "runs", "last run", "cases now", "shifts")
    for name, found in scenarios.items():
        last = max((trend.answers[-1] for trend in found), key=lambda answer: answer.created)
        counts = Counter(trend.answers[-1].outcome for trend in found)
        words = ", ".join(f"{counts[o]} {o}" for o in OUTCOMES if counts[o])
        runs = {answer.folder for trend in found for answer in trend.answers}
        _row(table, name, len(runs), when(last), words, sum(len(t.shifts) for t in found) or "")
    console.print(table)


def print_cases_of(console: Console, scenario: str, found: Sequence[CaseTrend]) -> None:
    """A line a case, those that fail first: since when, the last good commit, current values."""
    console.print(cell(f"{scenario}: {count(len(found), 'case')}", "bold"))
    wide = ["step", "peak"] if console.width >= WIDE_COLUMNS else []
    table = plain_table("case", "runs", "now", "bad since", "last good", *wide, "shifts")
    for trend in sorted(found, key=lambda trend: (trend.first_bad is None, trend.case_id)):
        last, bad, good = trend.answers[-1], trend.first_bad, trend.last_good
        values = [seconds(last.step_s), mebibytes(last.peak_bytes)] if wide else []
        _row(
            table, trend.case_id, trend.num_runs, cell(last.verdict, COLOURS[last.outcome]),
            when(bad) if bad else "", short(good.commit) if good else "never", *values,
            ", ".join(f"{METRIC_NAMES[s.metric]} {s.ratio:+.1%}" for s in trend.shifts),
        )  # fmt: skip
    console.print(table)


def print_case_trend(console: Console, trend: CaseTrend) -> None:
    """One case answer by answer, the newest last; then changes, series and the turning point."""
    head = f"{trend.case_id}  ({trend.scenario}): {count(trend.num_runs, 'run')}"
    console.print(cell(head, "bold"))
    wide = ["start-up"] if console.width >= WIDE_COLUMNS else []
    table = plain_table("run", "commit", "outcome", "step", "peak", *wide, "in")
    for answer in trend.answers[-MOST_ANSWERS:]:
        words = f"{answer.verdict}{f' (attempt {answer.attempt + 1})' * bool(answer.attempt)}"
        words += f" (after {', '.join(answer.retried)})" if answer.retried else ""
        _row(
            table, when(answer), short(answer.commit), cell(words, COLOURS[answer.outcome]),
            seconds(answer.step_s), mebibytes(answer.peak_bytes),
            *([seconds(answer.startup_s)] if wide else []), answer.series,
        )  # fmt: skip
    console.print(table)
    if (hidden := len(trend.answers) - MOST_ANSWERS) > 0:
        console.print(cell(f"{hidden} earlier answers are not shown", "dim"))
    for letter, words in trend.series.items():
        if words:
            console.print(cell(f"{letter} is not compared with the series before it: {words}"))
    for shift in trend.shifts:
        console.print(shift_text(shift))
    console.print(turning_point(trend))


def shift_text(shift: Shift) -> Text:
    """A lasting change in one sentence."""
    form = mebibytes if shift.metric == "peak_bytes" else seconds
    return cell(
        f"{METRIC_NAMES[shift.metric]} {shift.ratio:+.1%} since {when(shift.first)} "
        f"(series {shift.series}): {form(shift.before)} became {form(shift.after)}, noise "
        f"{shift.noise:.2%}, between {short(shift.last_before.commit)} and "
        f"{short(shift.first.commit)}",
        "red" if shift.ratio > 0 else "green",
    )


def turning_point(trend: CaseTrend) -> Text:
    """Since when it fails, and after which commit; or that it does not, as far as is known."""
    bad, good = trend.first_bad, trend.last_good
    after = f"{when(good)} at {short(good.commit)}" if good else ""
    if bad is None:
        if good is None:
            return cell("no verdict in these runs", "yellow")
        if trend.answers[-1].outcome == "passed":
            return cell("it does not fail now", "green")
        return cell(f"no verdict since it passed, {after}", "yellow")
    since = f"first bad run {when(bad)} at {short(bad.commit)}"
    if good is None:
        return cell(f"{since}, or earlier: no pass in these runs", COLOURS["failed"])
    same = good.commit and good.commit == bad.commit
    hint = ": the same commit, so see --flaky and what the machine did" if same else ""
    return cell(f"{since}, last good {after}{hint}", COLOURS["failed"])


def print_flaky(console: Console, found: Sequence[Flaky]) -> None:
    """Cases whose verdict changed by itself, or that the machine failed first, worst first."""
    if not found:
        console.print(cell(
            "no verdict changed without a change of commit or environment, and none took more than "
            "one attempt"
        ))  # fmt: skip
        return
    table = plain_table("case", "changed", "of repeats", "verdicts", "retried", "last")
    for entry in found:
        _row(
            table, f"{entry.scenario}/{entry.case_id}", entry.changes, entry.repeats,
            ", ".join(entry.verdicts),
            ", ".join(f"{times} x {name}" for name, times in entry.retried.items()),
            when(entry.last),
        )  # fmt: skip
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
        for name, sides in done.environment.items():
            _row(table, name, *sides)
        console.print(table)
    else:
        console.print(cell("environment: the same"))
    if differing := [case for case in done.cases if case.state not in ("alike", "noisy")]:
        wide = ["step", "peak"] if console.width >= WIDE_COLUMNS else []
        table = plain_table("case", "before", "after", *wide, "what to look at")
        for case in sorted(differing, key=lambda case: not case.worse):
            deltas = {delta.metric: delta for delta in case.deltas}
            values = [_delta(deltas.get(name)) for name in ("step_s", "peak_bytes") if wide]
            _row(
                table, case.case_id, case.before or "absent", case.after or "absent", *values,
                cell("; ".join(_to_look_at(case)), "red" if case.worse else ""),
            )  # fmt: skip
        console.print(table)
    for metric, noise in done.noise.items():
        words = f"noise of {METRIC_NAMES[metric]}: {noise:.2%} (reference, control)"
        console.print(cell(words, "dim"))
    console.print(_counts(done.cases))


def _row(table: Table, *values: object) -> None:
    table.add_row(*(value if isinstance(value, Text) else cell(value) for value in values))


def _to_look_at(case: CaseChange) -> list[str]:
    better = [
        f"{METRIC_NAMES[delta.metric]} fell by {-delta.ratio:.1%}"
        for delta in case.deltas
        if delta.change == "better"
    ]
    incomparable = [f"incomparable: {case.incomparable}"] if case.incomparable else []
    return [*case.worse, *better, *incomparable]


def _delta(delta: Delta | None) -> str:
    """'+3.1% ±0.4%', and whether it was too noisy to judge."""
    if delta is None:
        return ""
    noisy = " noisy" if delta.change == "noisy" else ""
    return f"{delta.ratio:+.1%} ±{delta.noise:.1%}{noisy}"


def _counts(cases: Sequence[CaseChange]) -> Text:
    """'12 cases: 1 worse, 2 incomparable, 1 added, 8 alike'."""
    counts = Counter(case.state for case in cases)
    words = ", ".join(f"{counts[state]} {state}" for state in get_args(State) if counts[state])
    return cell(f"{count(len(cases), 'case')}: {words or 'nothing to compare'}")


def when(answer: Answer) -> str:
    """'2031-02-03 04:05' in UTC."""
    return answer.created[:16].replace("T", " ") or "unknown"


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
