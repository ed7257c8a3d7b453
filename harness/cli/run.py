"""`harness run` and `harness rerun`: from their options to verdicts, reports and an exit code."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from harness.cli import report as report_commands
from harness.cli.bisect_exit import bisect_exit
from harness.cli.report import (
    command_line,
)
from harness.cli.suite import suite_options
from harness.errors import UsageError, one_line
from harness.history import DATABASE_FILE, remember
from harness.masking import Masker
from harness.records import CaseSpec, ExitCode
from harness.runner import display, launch
from harness.runner.again import set_killed_aside
from harness.runner.progress import duration, make_view
from harness.scenario.schema import ENGINES, Overrides
from harness.store.verify import DEFAULT_OUT, bisect_line, find_case

_PATH = click.Path(path_type=Path)
Command = Callable[..., Any]


def _options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def wrap(function: Command) -> Command:
        for option in reversed(options):
            function = option(function)
        return function

    return wrap


_keyword = click.option(
    "-k",
    "keyword",
    metavar="EXPR",
    help="Only cases whose id or labels match, as in pytest: 'dp2 and not attn'.",
)
_json = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON value on stdout; messages go to stderr."
)
_slots = click.option(
    "--slots",
    type=click.IntRange(1),
    help="Ranks that run at the same time; by default one a GPU, or by memory on a CPU.",
)
_ranks_per_gpu = click.option(
    "--ranks-per-gpu", type=click.IntRange(1), metavar="N",
    help="Let N ranks share a GPU, to run layouts that need more GPUs; times are then meaningless.",
)  # fmt: skip
_jobs = click.option(
    "--jobs",
    type=click.IntRange(1),
    help="Runs at the same time at most; by default as many as fit the slots.",
)
_out = click.option(
    "--out",
    type=_PATH,
    metavar="FOLDER",
    help="Run folder to create; by default a new one under out/.",
)
_exit_first = click.option("-x", "exit_first", is_flag=True, help="Stop at the first failed case.")
_device = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    help="Device of every run; overrides launch.device.",
)
_history = _options(
    click.option(
        "--history", "database", type=_PATH, metavar="FILE",
        help=f"Record results in this file; by default {DATABASE_FILE} next to the run folder.",
    ),
    click.option("--no-history", is_flag=True, help="Do not record results in a history."),
)  # fmt: skip
_engine = _options(
    click.option(
        "--engine",
        type=click.Choice(ENGINES),
        help="Start runs on this machine or in an allocation of Slurm; overrides launch.engine.",
    ),
    click.option(
        "--slurm",
        multiple=True,
        metavar="KEY=YAML",
        help="Replace a value of launch.slurm, as partition=gpu.",
    ),
)
_overrides = _options(
    click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="KEY=YAML",
        help="Replace a value of base, as fsdp.strategy=no_shard.",
    ),
    click.option(
        "--axis",
        "axes",
        multiple=True,
        metavar="NAME=LIST",
        help="Replace the values of an axis, as graph=[eager,[attn]].",
    ),
)


@click.command()
@click.argument("paths", type=_PATH, nargs=-1, metavar="[SCENARIO]...")
@_options(suite_options, _keyword, _jobs, _slots, _ranks_per_gpu, _device, _out, _exit_first, _json)
@_options(_engine, _history, _overrides, bisect_exit)
@report_commands.open_report
@click.option(
    "--dry-run", is_flag=True, help="Print the plan and an estimate of its time; run nothing."
)
@click.option(
    "--resume",
    type=_PATH,
    metavar="RUN",
    help="Continue an interrupted run folder: finished runs are kept.",
)
@click.option(
    "--mixed", is_flag=True, help="With --resume: continue even if code or packages changed since."
)
@click.option(
    "--again-killed",
    is_flag=True,
    help="With --resume: run again every run that was killed, also those that may have been "
    "killed for using too much memory.",
)
def run(
    *, sets: tuple[str, ...], axes: tuple[str, ...], opens: bool,
    dry_run: bool, again_killed: bool, as_json: bool, database: Path | None, no_history: bool,
    **request: Any,
) -> int:  # fmt: skip
    """Run SCENARIO files, or all in folders, with one schedule and one report."""
    asked = launch.Request(
        overrides=Overrides(sets, axes),
        history=None if no_history else database or _beside(request["resume"] or request["out"]),
        **request,
    )
    if asked.mixed and asked.resume is None:
        raise UsageError("--mixed: expected --resume RUN with it")
    if again_killed:
        if asked.resume is None or dry_run:
            raise UsageError("--again-killed: expected --resume RUN with it, and no --dry-run")
        set_killed_aside(asked.resume)
    prepared = launch.prepare(asked)
    if dry_run:
        return _show_plan(prepared, as_json=as_json)
    return _carry_out(
        prepared, out=asked.out, exit_first=asked.exit_first, as_json=as_json,
        database=database, no_history=no_history, opens=opens,
    )  # fmt: skip


def _beside(folder: Path | None) -> Path:
    """The history where a run folder is recorded, if none is named."""
    return (DEFAULT_OUT if folder is None else folder.absolute().parent) / DATABASE_FILE


def _show_plan(prepared: launch.Prepared, *, as_json: bool) -> int:
    plan = prepared.plan
    if as_json:
        click.echo(json.dumps(plan.to_json(), allow_nan=False))
    else:
        display.print_plan(display.make_console(), plan)
        click.echo("".join(f"{note}\n" for note in prepared.notes), nl=False)
    if not plan.runs and len(plan.skipped) == len(plan.cases):
        return ExitCode.NOTHING_RAN
    return ExitCode.PASSED


def _carry_out(
    prepared: launch.Prepared, *, out: Path | None, exit_first: bool, as_json: bool,
    database: Path | None, no_history: bool, opens: bool = False,
) -> int:  # fmt: skip
    from harness.checks.judge import exit_code

    console = display.make_console(stderr=as_json)
    for note in prepared.notes:
        console.print(Text(note), soft_wrap=True)
    try:
        done = launch.carry_out(
            prepared, make_view(console), out=out, exit_first=exit_first, argv=command_line()
        )
    except launch.CutShort as error:
        _tell_cut_short(console, error, database, as_json=as_json)
        raise
    code = _final_code(exit_code(done.verdicts), done)
    display.print_outcome(console, done.verdicts, done.num_cases)
    _tell_where(console, done)
    _tell_bisect(console, prepared.plan.cases, done)
    if prepared.slurm is None and done.occupancy.num_runs:
        console.print(Text(done.occupancy.line()), soft_wrap=True)
    if not no_history:
        warning = remember(done.folder, database or done.folder.parent / DATABASE_FILE)
        if warning:
            click.echo(f"harness: {warning}", err=True)
    # After the verdicts are told: a report that cannot be written must not swallow them.
    reports = report_commands.build_reports(done.folder, database)
    _tell_reports(console, reports)
    if as_json:
        click.echo(json.dumps(_result(done, reports, code), allow_nan=False))
    if opens:
        report_commands.show_page(reports)
    return code


def _tell_where(console: Console, done: launch.Carried) -> None:
    console.print(Text(f" in {duration(done.wall_s)}; run folder {done.folder}"), soft_wrap=True)


def _tell_bisect(console: Console, cases: Sequence[CaseSpec], done: launch.Carried) -> None:
    """The command that finds the cause of the first failure that can be searched."""
    failed = {verdict.case_id for verdict in done.verdicts if verdict.outcome == "failed"}
    for case in cases:
        if case.id in failed and (command := bisect_line(case, done.folder / "cases" / case.id)):
            console.print(Text(f"find the cause: {command}"), soft_wrap=True)
            return


def _tell_reports(console: Console, reports: dict[str, Path]) -> None:
    if "html" in reports:
        console.print(Text(f"report: {reports['html']}"), soft_wrap=True)


def _tell_cut_short(
    console: Console, cut: launch.CutShort, database: Path | None, *, as_json: bool
) -> None:
    """What was done until somebody stopped it; one more Ctrl-C, and the rest is left out."""
    done, reports = cut.done, dict[str, Path]()
    display.print_outcome(console, done.verdicts, done.num_cases)
    _tell_where(console, done)
    try:
        if done.verdicts:
            # Of hundreds of cases it takes a while, which must not look like a harness that hangs.
            console.print(Text("interrupted: writing the report, one more Ctrl-C leaves it out"))
            reports = report_commands.build_reports(done.folder, database)
        _tell_reports(console, reports)
    except KeyboardInterrupt:
        raise cut from None
    except Exception as error:  # noqa: BLE001 - it does not change why the run ended
        told = Masker(os.environ).text(one_line(f"{type(error).__name__}: {error}"))
        click.echo(f"harness: no report: {told}", err=True)
    if as_json:
        click.echo(json.dumps(_result(done, reports, cut.exit_code), allow_nan=False))


def _final_code(code: ExitCode, done: launch.Carried) -> ExitCode:
    """A case without a verdict is not a pass, whatever the other cases say."""
    if code == ExitCode.PASSED and len(done.verdicts) < done.num_cases:
        return ExitCode.NO_VERDICT
    return code


def _result(done: launch.Carried, reports: dict[str, Path], code: int) -> dict[str, Any]:
    return {
        "exit_code": int(code),
        "folder": str(done.folder),
        "reports": {name: str(path) for name, path in reports.items()},
        "verdicts": [verdict.to_json() for verdict in done.verdicts],
        "num_cases": done.num_cases,
        "wall_s": done.wall_s,
        "occupancy": done.occupancy.to_json() | {"share": done.occupancy.share},
    }


@click.command()
@click.argument("case")
@click.argument("folder", type=_PATH, metavar="[RUN]", required=False)
@_options(_out, _slots, _ranks_per_gpu, _jobs, _json, _history, bisect_exit)
def rerun(
    *, case: str, folder: Path | None, out: Path | None, as_json: bool,
    database: Path | None, no_history: bool, **room: Any,
) -> int:  # fmt: skip
    """Run one case again.

    CASE is a case folder, which is all that is needed, or an id in RUN (the newest under out/).
    """
    place, _ = find_case(case, folder)
    prepared = launch.prepare_rerun(place, **room)
    return _carry_out(
        prepared, out=out, exit_first=False, as_json=as_json,
        database=database, no_history=no_history,
    )  # fmt: skip
