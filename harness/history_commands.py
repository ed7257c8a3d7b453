"""The commands `harness history` and `harness compare`."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from harness import display, history_tables
from harness.checks.evidence import count
from harness.disk import write_atomic
from harness.errors import Infrastructure, NothingSelected, UsageError, did_you_mean, shown
from harness.history import (
    DATABASE_FILE,
    CaseTrend,
    History,
    Recorded,
    compare,
    flaky_cases,
    gather,
    record_folder,
    trends,
)
from harness.history.entries import FolderEntry
from harness.lookup import DEFAULT_OUT
from harness.records import ExitCode
from harness.store import RunFolder

_PATH = click.Path(path_type=Path)
_json = click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
_database = click.option(
    "--history", "database", type=_PATH, metavar="FILE",
    default=DEFAULT_OUT / DATABASE_FILE, show_default=True, help="The history.",
)  # fmt: skip
DEFAULT_DAYS = 60


@click.command("history")
@click.argument("name", required=False, metavar="[CASE|SCENARIO]")
@_database
@click.option(
    "--days", type=click.IntRange(1), default=DEFAULT_DAYS, show_default=True,
    help="Look at the last N days on which something ran.",
)  # fmt: skip
@click.option("--flaky", is_flag=True, help="Cases whose verdict changed by itself.")
@click.option("--add", "folders", type=_PATH, multiple=True, metavar="RUN", help="Record a run.")
@click.option("--import", "files", type=_PATH, multiple=True, metavar="FILE", help="Merge a file.")
@click.option("--export", type=_PATH, metavar="FILE", help="Write JSON lines; - is stdout.")
@_json
def history_command(
    *, name: str | None, database: Path, days: int, flaky: bool, folders: tuple[Path, ...],
    files: tuple[Path, ...], export: Path | None, as_json: bool,
) -> int:  # fmt: skip
    """What earlier nights say of a CASE or a SCENARIO, or of all of them.

    A case that two scenarios have is SCENARIO/CASE.
    """
    if folders or files:
        return _take_in(database, folders, files, as_json=as_json)
    with History.open(database) as history:
        if export is not None:
            _export(history, export)
        else:
            found = _chosen(history, name, days)
            _show(found, name, flaky=flaky, as_json=as_json)
        return _told_damage(history)


def _take_in(
    database: Path, folders: Iterable[Path], files: Iterable[Path], *, as_json: bool
) -> int:
    added, wrong = Recorded(), 0
    for folder in folders:
        new, warning = record_folder(folder, database)
        added += new
        if warning:
            wrong += 1
            click.echo(f"harness: {warning}", err=True)
    for file in files:
        with History.open(database, create=True) as history:
            new, problems = history.load(file)
        added += new
        wrong += len(problems)
        for problem in problems:
            click.echo(f"harness: {file}: {problem}", err=True)
    if as_json:
        click.echo(json.dumps(added.to_json()))
    else:
        differing = f"; {added.differing} were recorded otherwise and stand" * bool(added.differing)
        click.echo(
            f"{database}: {count(added.folders, 'run')}, {count(added.cases, 'answer')} and "
            f"{count(added.runs, 'attempt')} are new{differing}"
        )
    return ExitCode.NO_VERDICT if wrong else ExitCode.PASSED


def _export(history: History, place: Path) -> None:
    if str(place) == "-":
        sys.stdout.writelines(history.export())
        return
    write_atomic(place, "".join(history.export()))


def _chosen(history: History, name: str | None, days: int) -> dict[str, tuple[CaseTrend, ...]]:
    """Trends by scenario: of all, of one, or of the cases that have this id."""
    rows = history.connection.execute(
        "SELECT DISTINCT folders.scenario, cases.case_id FROM cases JOIN folders "
        "ON cases.folder = folders.id ORDER BY 1, 2"
    )
    pairs = [(str(row[0]), str(row[1])) for row in rows.fetchall()]
    if not pairs:
        raise NothingSelected(f"{history.path} holds no run yet")
    scenarios = list(dict.fromkeys(scenario for scenario, _ in pairs))
    if name is None or name in scenarios:
        wanted = [(scenario, None) for scenario in scenarios if name in (None, scenario)]
        found = {scenario: trends(history, scenario, days=days) for scenario, _ in wanted}
    else:
        having = [(s, c) for s, c in pairs if name in (c, f"{s}/{c}")]
        if not having:
            known = [*scenarios, *dict.fromkeys(case for _, case in pairs)]
            raise UsageError(
                f"{shown(name)}: expected a case or a scenario of {history.path}"
                f"{did_you_mean(name, known)}"
            )
        found = {s: trends(history, s, case, days=days) for s, case in having}
    kept = {scenario: cases for scenario, cases in found.items() if cases}
    if not kept:
        raise NothingSelected(f"nothing of {shown(name)} in the last {days} days of the history")
    return kept


def _show(
    found: dict[str, tuple[CaseTrend, ...]], name: str | None, *, flaky: bool, as_json: bool
) -> None:
    everything = [trend for cases in found.values() for trend in cases]
    if as_json:
        answers = flaky_cases(everything) if flaky else everything
        click.echo(json.dumps([answer.to_json() for answer in answers], allow_nan=False))
        return
    console = display.make_console()
    if flaky:
        history_tables.print_flaky(console, flaky_cases(everything))
    elif name is None:
        history_tables.print_scenarios(console, found)
    elif name in found:
        history_tables.print_cases_of(console, name, found[name])
    else:
        for trend in everything:
            history_tables.print_case_trend(console, trend, num_nights=DEFAULT_DAYS)


def _told_damage(history: History) -> int:
    for line in dict.fromkeys(history.damaged):
        click.echo(f"harness: {history.path}: left out, damaged: {line}", err=True)
    return ExitCode.NO_VERDICT if history.damaged else ExitCode.PASSED


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
        history_tables.print_comparison(display.make_console(), done)
    return done.exit_code


def _entry(name: str, database: Path) -> FolderEntry:
    if Path(name).exists():
        return gather(RunFolder.open(Path(name)))
    found: list[FolderEntry] = []
    if database.exists():
        with History.open(database) as history:
            found = history.starting_with(name)
            if history.damaged:
                raise Infrastructure(f"{history.path}: damaged: {history.damaged[0]}")
    if len(found) != 1:
        several = "several runs of" if found else "nothing, also in"
        raise UsageError(f"{shown(name)}: expected a run folder or an id, got {several} {database}")
    return found[0]
