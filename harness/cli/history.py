"""The commands `harness history` and `harness compare`, and their tables."""

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import click
from rich.console import Console

from harness import cli
from harness.checks.evidence import count
from harness.cli import PATH, print_json
from harness.errors import NothingSelected, UsageError, did_you_mean, shown
from harness.history.ledger import HISTORY_FOLDER, FolderEntry, History, gather, record_folder
from harness.history.trend import (
    METRIC_NAMES,
    CaseChange,
    CaseTrend,
    Comparison,
    Delta,
    Flaky,
    State,
    compare,
    flaky_cases,
    open_cases,
    shift_text,
    short,
    trends,
    turning_point,
    value,
    when,
)
from harness.records import OUTCOMES, ExitCode
from harness.store import RunFolder
from harness.store.folder import DEFAULT_OUT
from harness.terminal import COLOURS, cell, make_console, print_line, print_table

MOST_ANSWERS = 60
"""Of one case: what a table shows of them."""
_database = click.option(
    "--history", "database", type=PATH, metavar="FOLDER",
    default=DEFAULT_OUT / HISTORY_FOLDER, show_default=True, help="Folder of the history.",
)  # fmt: skip


@click.command("history")
@click.argument("name", required=False, metavar="[CASE|SCENARIO]")
@_database
@click.option("--days", type=click.IntRange(1), default=60, show_default=True,
              help="Show the last N days with runs.")  # fmt: skip
@click.option(
    "--flaky", is_flag=True,
    help="Show cases whose verdict changed without a change of code or packages.",
)  # fmt: skip
@click.option("--add", "folders", type=PATH, multiple=True, metavar="RUN",
              help="Record a run folder, and show nothing.")  # fmt: skip
@cli.as_json
def history_command(
    *, name: str | None, database: Path, days: int, flaky: bool, folders: tuple[Path, ...],
    as_json: bool,
) -> int:  # fmt: skip
    """What earlier runs say of a CASE or a SCENARIO, or of all of them.

    A case that two scenarios have is SCENARIO/CASE.
    """
    if folders:
        _take_in(database, folders, as_json=as_json)
        return ExitCode.PASSED
    found = _chosen(History.open(database), name, days)
    chosen = [trend for cases in found.values() for trend in cases]
    console = make_console()
    if as_json:
        print_json([entry.to_json() for entry in (flaky_cases(chosen) if flaky else chosen)])
    elif flaky:
        print_flaky(console, flaky_cases(chosen))
    elif name is None:
        print_scenarios(console, found)
    elif name in found:
        print_cases_of(console, name, chosen)
    else:
        for trend in chosen:
            print_case_trend(console, trend)
    return ExitCode.PASSED


def _take_in(database: Path, folders: Sequence[Path], *, as_json: bool) -> None:
    added = Counter(folders=0, cases=0, runs=0, differing=0)
    for folder in folders:
        added.update(record_folder(folder, database))
    if as_json:
        print_json(added)
        return
    differing = added["differing"]
    kept = f"; {differing} already recorded with different content were kept unchanged"
    click.echo(
        f"{database}: {count(added['folders'], 'run folder')}, {count(added['cases'], 'answer')} "
        f"and {count(added['runs'], 'attempt')} are new{kept if differing else ''}"
    )


def _chosen(history: History, name: str | None, days: int) -> dict[str, list[CaseTrend]]:
    """Trends by scenario: of all, of one, or of the cases that have this id."""
    held = trends(history, days=days)
    if not held:
        raise NothingSelected(f"{history.path} holds no run yet")
    found: dict[str, list[CaseTrend]] = {}
    for trend in held:
        names = (trend.scenario, trend.case_id, f"{trend.scenario}/{trend.case_id}")
        if name is None or name in names:
            found.setdefault(trend.scenario, []).append(trend)
    found = {name: found[name]} if name is not None and name in found else found
    if not found:
        known = [n for trend in held for n in (trend.scenario, trend.case_id)]
        raise UsageError(
            f"{shown(str(name))}: expected a case or a scenario that ran in the last {days} days, "
            f"by {history.path}{did_you_mean(str(name), dict.fromkeys(known))}"
        )
    return found


@click.command("compare")
@click.argument("before", metavar="RUN")
@click.argument("after", metavar="RUN")
@_database
@cli.as_json
def compare_command(*, before: str, after: str, database: Path, as_json: bool) -> int:
    """Compare two runs: environments first, then what is worse.

    RUN is a run folder, or the beginning of its id in the history. Exit codes: 0 nothing is worse,
    1 something is, 6 something could not be compared or has no answer.
    """
    done = compare(_entry(before, database), _entry(after, database))
    if as_json:
        plain = done.to_json() | {"exit_code": int(done.exit_code)}
        for side in ("before", "after"):
            plain[side] = {k: v for k, v in plain[side].items() if k not in ("cases", "runs")}
        print_json(plain)
    else:
        print_comparison(make_console(), done)
    return done.exit_code


def _entry(name: str, database: Path) -> FolderEntry:
    if Path(name).exists():
        return gather(RunFolder.open(Path(name)))
    found: list[FolderEntry] = []
    if name and database.exists():
        found = list(itertools.islice(History.open(database).entries(name), 2))
    if len(found) != 1:
        several = "several runs of" if found else "nothing, also in"
        raise UsageError(f"{shown(name)}: expected a run folder or an id, got {several} {database}")
    return found[0]


# --- tables -----------------------------------------------------------------------------------


def print_scenarios(console: Console, scenarios: dict[str, list[CaseTrend]]) -> None:
    """A line a scenario: runs, the last answers, failing cases, changed values."""
    rows = []
    for name, found in scenarios.items():
        last = max((trend.answers[-1] for trend in found), key=lambda answer: answer.created)
        counts = Counter(trend.answers[-1].outcome for trend in found)
        words = ", ".join(f"{counts[o]} {o}" for o in OUTCOMES if counts[o])
        runs = {answer.folder for trend in found for answer in trend.answers}
        shifts = sum(len(trend.shifts) for trend in found)
        rows.append((name, len(runs), when(last), words, shifts or ""))
    print_table(console, ("scenario", "runs", "last run", "cases now", "shifts"), rows)


def print_cases_of(console: Console, scenario: str, found: Sequence[CaseTrend]) -> None:
    """A line a case, those that fail first: since when, the last good commit, current values."""
    console.print(cell(f"{scenario}: {count(len(found), 'case')}", "bold"))
    rows = []
    for trend in sorted(found, key=lambda trend: (trend.first_bad is None, trend.case_id)):
        last, good = trend.answers[-1], trend.last_good
        rows.append((
            trend.case_id, trend.num_runs, cell(last.verdict, COLOURS[last.outcome]),
            when(trend.first_bad), short(good.commit) if good else "never",
            value("step_s", last.step_s), value("peak_bytes", last.peak_bytes),
            ", ".join(f"{METRIC_NAMES[s.metric]} {s.ratio:+.1%}" for s in trend.shifts),
        ))  # fmt: skip
    columns = ("case", "runs", "now", "bad since", "last good", "step", "peak", "shifts")
    print_table(console, columns, rows)


def print_case_trend(console: Console, trend: CaseTrend) -> None:
    """One case answer by answer, the newest last; then changes, series and the turning point."""
    head = f"{trend.case_id}  ({trend.scenario}): {count(trend.num_runs, 'run')}"
    console.print(cell(head, "bold"))
    rows = []
    for answer in trend.answers[-MOST_ANSWERS:]:
        words = f"{answer.verdict}{f' (attempt {answer.attempt + 1})' * bool(answer.attempt)}"
        words += f" (after {', '.join(answer.retried)})" if answer.retried else ""
        measured = (value(metric, getattr(answer, metric)) for metric in METRIC_NAMES)
        rows.append((when(answer), short(answer.commit), cell(words, COLOURS[answer.outcome]),
                     *measured, answer.series))  # fmt: skip
    columns = ("run", "commit", "outcome", "step", "peak", "start-up", "in")
    print_table(console, columns, rows)
    if (hidden := len(trend.answers) - MOST_ANSWERS) > 0:
        console.print(cell(f"{hidden} earlier answers are not shown", "dim"))
    for letter, words in trend.series.items():
        if words:
            console.print(cell(f"{letter} is not compared with the series before it: {words}"))
    for shift in trend.shifts:
        console.print(cell(shift_text(shift), "red" if shift.ratio > 0 else "green"))
    words, outcome = turning_point(trend)
    console.print(cell(words, COLOURS[outcome]))


def print_flaky(console: Console, found: Sequence[Flaky]) -> None:
    """Cases whose verdict changed by itself, or that the machine failed first, worst first."""
    if not found:
        print_line(console, "no verdict changed without a change of commit or environment, and "
                            "none took more than one attempt")  # fmt: skip
    rows = (
        (f"{entry.scenario}/{entry.case_id}", entry.changes, entry.repeats,
         ", ".join(entry.verdicts),
         ", ".join(f"{times} x {name}" for name, times in entry.retried.items()), when(entry.last))
        for entry in found
    )  # fmt: skip
    columns = ("case", "changed", "of repeats", "verdicts", "retried", "last")
    print_table(console, columns, rows)


def print_comparison(console: Console, done: Comparison) -> None:
    """Environment first, then cases that differ, then counts."""
    for name, folder in (("before", done.before), ("after", done.after)):
        shard = f"  shard {folder.shard}" * bool(folder.shard)
        words = f"{name:<7} {folder.scenario}  {folder.created}  {short(folder.commit)}{shard}"
        console.print(cell(words, "bold"))
        if missing := open_cases(folder):
            console.print(cell(f"{name}: {count(missing, 'case')} without an answer", "yellow"))
    if not done.environment:
        console.print(cell("environment: the same"))
    changed = ((name, *sides) for name, sides in done.environment.items())
    print_table(console, ("environment", "before", "after"), changed)
    rows, differing = [], [c for c in done.cases if c.state not in ("alike", "noisy")]
    for case in sorted(differing, key=lambda case: not case.worse):
        deltas = {delta.metric: _delta(delta) for delta in case.deltas}
        rows.append((
            case.case_id, case.before or "absent", case.after or "absent",
            deltas.get("step_s", ""), deltas.get("peak_bytes", ""),
            cell("; ".join(_to_look_at(case)), "red" if case.worse else ""),
        ))  # fmt: skip
    print_table(console, ("case", "before", "after", "step", "peak", "what to look at"), rows)
    for metric, noise in done.noise.items():
        words = f"noise of {METRIC_NAMES[metric]}: {noise:.2%} (reference, control)"
        console.print(cell(words, "dim"))
    counts = Counter(case.state for case in done.cases)
    words = ", ".join(f"{counts[state]} {state}" for state in get_args(State) if counts[state])
    console.print(f"{count(len(done.cases), 'case')}: {words or 'nothing to compare'}")


def _to_look_at(case: CaseChange) -> list[str]:
    better = [f"{METRIC_NAMES[delta.metric]} fell by {-delta.ratio:.1%}"
              for delta in case.deltas if delta.change == "better"]  # fmt: skip
    incomparable = [f"incomparable: {case.incomparable}"] if case.incomparable else []
    return [*case.worse, *better, *incomparable]


def _delta(delta: Delta) -> str:
    """'+3.1% ±0.4%', and whether it was too noisy to judge."""
    return f"{delta.ratio:+.1%} ±{delta.noise:.1%}{' noisy' * (delta.change == 'noisy')}"
