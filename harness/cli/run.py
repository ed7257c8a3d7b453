"""`harness run` and `harness rerun`: from their options to verdicts, reports and an exit code."""

import os
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from harness.checks import exit_code
from harness.cli import options
from harness.cli.options import PATH, print_json
from harness.cli.report import Reports, as_text, open_page, report_again
from harness.errors import UsageError, one_line
from harness.history import HISTORY_FOLDER, remember
from harness.masking import Masker
from harness.records import ExitCode
from harness.runner import launch
from harness.runner.run import set_killed_aside
from harness.scenario.schema import ENGINES, Overrides
from harness.store.verify import DEFAULT_OUT, bisect_line, find_case
from harness.terminal import (
    duration,
    make_console,
    make_view,
    print_line,
    print_outcome,
    print_plan,
    typed,
)

_history = options.options(
    click.option(
        "--history", "database", type=PATH, metavar="FOLDER",
        help=f"Record results in this folder; by default {HISTORY_FOLDER} next to the run folder.",
    ),
    click.option("--no-history", is_flag=True, help="Do not record results in a history."),
)  # fmt: skip


@click.command()
@click.argument("paths", type=PATH, nargs=-1, metavar="[SCENARIO]...")
@options.options(options.suite, options.keyword, options.room, options.device, options.out)
@click.option("-x", "exit_first", is_flag=True, help="Stop at the first failed case.")
@options.as_json
@click.option(
    "--engine", type=click.Choice(ENGINES),
    help="Start runs here or on the nodes of the Slurm job around it; overrides launch.engine.",
)  # fmt: skip
@click.option("--slurm", multiple=True, metavar="KEY=YAML",
              help="Replace a value of launch.slurm, as nodes=2.")  # fmt: skip
@options.options(_history, options.overrides, options.bisect_exit, options.opens)
@click.option(
    "--dry-run", is_flag=True, help="Print the plan and an estimate of its time; run nothing."
)
@click.option("--resume", type=PATH, metavar="RUN",
              help="Continue an interrupted run folder: finished runs are kept.")  # fmt: skip
@click.option(
    "--mixed", is_flag=True, help="With --resume: continue even if code or packages changed since."
)
@click.option(
    "--again-killed", is_flag=True,
    help="With --resume: run again every run that was killed, also those that may have been "
    "killed for using too much memory.",
)  # fmt: skip
def run(
    *, sets: tuple[str, ...], axes: tuple[str, ...], dry_run: bool, again_killed: bool,
    as_json: bool, database: Path | None, no_history: bool, opens: bool, **request: Any,
) -> int:  # fmt: skip
    """Run SCENARIO files, or all in folders, with one schedule and one report."""
    place = request["resume"] or request["out"]
    history = (DEFAULT_OUT if place is None else place.absolute().parent) / HISTORY_FOLDER
    wanted = launch.Request(
        overrides=Overrides(sets, axes), history=None if no_history else database or history,
        **request,
    )  # fmt: skip
    if wanted.mixed and wanted.resume is None:
        raise UsageError("--mixed: expected --resume RUN with it")
    if again_killed:
        if wanted.resume is None or dry_run:
            raise UsageError("--again-killed: expected --resume RUN with it, and no --dry-run")
        set_killed_aside(wanted.resume)
    prepared = launch.prepare(wanted)
    if not dry_run:
        return _carry_out(
            prepared, out=wanted.out, exit_first=wanted.exit_first, as_json=as_json,
            database=database, no_history=no_history, opens=opens,
        )  # fmt: skip
    plan = prepared.plan
    if as_json:
        print_json(plan.to_json())
    else:
        print_plan(make_console(), plan)
        click.echo("".join(f"{note}\n" for note in prepared.notes), nl=False)
    is_empty = not plan.runs and len(plan.skipped) == len(plan.cases)
    return ExitCode.NOTHING_RAN if is_empty else ExitCode.PASSED


@click.command()
@click.argument("case")
@click.argument("folder", type=PATH, metavar="[RUN]", required=False)
@options.options(options.out, options.room, options.as_json, _history, options.bisect_exit)
def rerun(
    *, case: str, folder: Path | None, slots: int | None, ranks_per_gpu: int | None,
    jobs: int | None, **how: Any,
) -> int:  # fmt: skip
    """Run one case again.

    CASE is a case folder, which is all that is needed, or an id in RUN (the newest under out/).
    """
    place, _ = find_case(case, folder)
    prepared = launch.prepare_rerun(place, slots=slots, ranks_per_gpu=ranks_per_gpu, jobs=jobs)
    return _carry_out(prepared, exit_first=False, **how)


def _carry_out(
    prepared: launch.Prepared, *, out: Path | None, exit_first: bool, as_json: bool,
    database: Path | None, no_history: bool, opens: bool = False,
) -> int:  # fmt: skip
    console = make_console(stderr=as_json)
    for note in prepared.notes:
        print_line(console, note)
    try:
        done = launch.carry_out(
            prepared, make_view(console), out=out, exit_first=exit_first,
            argv=options.command_line(),
        )  # fmt: skip
    except launch.CutShort as error:
        _show_cut_short(console, error, database, as_json=as_json)
        raise
    code = exit_code(done.verdicts)
    if code == ExitCode.PASSED and len(done.verdicts) < done.num_cases:
        code = ExitCode.NO_VERDICT  # a case without a verdict is not a pass
    _show_outcome(console, done)
    failed = {verdict.case_id for verdict in done.verdicts if verdict.outcome == "failed"}
    searches = (bisect_line(case, done.folder / "cases" / case.id)
                for case in prepared.plan.cases if case.id in failed)  # fmt: skip
    if command := next(filter(None, searches), ""):
        print_line(console, f"find the cause: {typed(command)}")
    history = database or done.folder.parent / HISTORY_FOLDER
    if not no_history and (warning := remember(done.folder, history)):
        click.echo(f"harness: {warning}", err=True)
    # After the verdicts: a report that cannot be written must not swallow them.
    reports = report_again(console, done.folder, database)
    if as_json:
        print_json(_result(done, reports, code))
    if opens:
        open_page(reports)
    return code


def _show_outcome(console: Console, done: launch.Carried) -> None:
    print_outcome(console, done.verdicts, done.num_cases)
    print_line(console, f" in {duration(done.wall_s)}; run folder {done.folder}")


def _show_cut_short(
    console: Console, cut: launch.CutShort, database: Path | None, *, as_json: bool
) -> None:
    """What was done until somebody stopped it; one more Ctrl-C, and the rest is left out."""
    done, reports = cut.done, Reports()
    _show_outcome(console, done)
    try:
        if done.verdicts:
            # Of hundreds of cases it takes a while, which must not look like a harness that hangs.
            console.print("interrupted: writing the report, one more Ctrl-C leaves it out")
            reports = report_again(console, done.folder, database)
    except KeyboardInterrupt:
        raise cut from None
    except Exception as error:  # noqa: BLE001 - it does not change why the run ended
        why = Masker(os.environ).text(one_line(f"{type(error).__name__}: {error}"))
        click.echo(f"harness: no report: {why}", err=True)
    if as_json:
        print_json(_result(done, reports, cut.exit_code))


def _result(done: launch.Carried, reports: Reports, code: int) -> dict[str, Any]:
    return {
        "exit_code": int(code), "folder": str(done.folder), "reports": as_text(reports),
        "verdicts": [verdict.to_json() for verdict in done.verdicts],
        "num_cases": done.num_cases, "wall_s": done.wall_s,
    }  # fmt: skip
