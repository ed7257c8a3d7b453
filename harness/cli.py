"""The command line: `harness run | list | rerun | doctor`, and the commands of other modules.

Every error goes through `main`: one line on stderr and the exit code of `harness.errors`. With
`--json`, stdout holds one JSON value and everything for people goes to stderr.
"""

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from harness import display, launch, report_commands
from harness.again import set_killed_aside
from harness.bisect_command import bisect_command
from harness.bisect_exit import bisect_exit, for_git
from harness.check_command import check_command
from harness.compare_runs_command import compare_runs_command
from harness.doctor import diagnose
from harness.errors import HarnessError, InternalError, Interrupted, UsageError, one_line
from harness.faults_command import faults_command
from harness.history import DATABASE_FILE, remember
from harness.history_commands import compare_command, history_command
from harness.machine import describe
from harness.masking import Masker
from harness.predict_command import predict_command
from harness.progress import duration, make_view
from harness.provenance import package_version
from harness.records import CaseSpec, ExitCode
from harness.report_commands import (
    command_line,
    merge_command,
    report_command,
    show_command,
)
from harness.scenario.schema import Overrides
from harness.scenario.sections import ENGINES
from harness.store.find import DEFAULT_OUT, bisect_line, find_case
from harness.suite_options import list_command, suite_options
from harness.typed import program
from harness.wrap_command import wrap_command

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
EXIT_CODES = "Exit codes: 0 passed, 1 a check failed, 2 interrupted, 3 internal, 4 usage, " \
    "5 nothing ran, 6 no verdict."  # fmt: skip

_PATH = click.Path(path_type=Path)
Command = Callable[..., Any]


def _options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def wrap(function: Command) -> Command:
        for option in reversed(options):
            function = option(function)
        return function

    return wrap


_keyword = click.option(
    "-k", "keyword", metavar="EXPR", help="Only cases that match, as in pytest: 'dp2 and not attn'."
)
_json = click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
_slots = click.option("--slots", type=click.IntRange(1), help="Ranks that may run at a time.")
_ranks_per_gpu = click.option(
    "--ranks-per-gpu", type=click.IntRange(1), metavar="N",
    help="Let N ranks share a GPU: layouts larger than the machine run, their times say nothing.",
)  # fmt: skip
_jobs = click.option("--jobs", type=click.IntRange(1), help="Runs that may run at a time.")
_out = click.option("--out", type=_PATH, metavar="FOLDER", help="Run folder to make.")
_exit_first = click.option("-x", "exit_first", is_flag=True, help="Stop at the first failure.")
_device = click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Where, over the scenario's."
)
_history = _options(
    click.option(
        "--history", "database", type=_PATH, metavar="FILE",
        help=f"History to record in, {DATABASE_FILE} beside the run folder by default.",
    ),
    click.option("--no-history", is_flag=True, help="Record nothing in the history."),
)  # fmt: skip
_engine = _options(
    click.option(
        "--engine", type=click.Choice(ENGINES), help="Where, over the scenario's launch.engine."
    ),
    click.option(
        "--slurm", multiple=True, metavar="KEY=YAML", help="Replace a value of launch.slurm."
    ),
)
_overrides = _options(
    click.option("--set", "sets", multiple=True, metavar="KEY=YAML", help="Replace a base value."),
    click.option("--axis", "axes", multiple=True, metavar="NAME=LIST", help="Replace an axis."),
)


@click.group(context_settings=HELP, epilog=EXIT_CODES)
@click.version_option(
    package_version("deltazero") or "of a source tree that is not installed",
    prog_name="harness", message="%(prog)s %(version)s",
)  # fmt: skip
def commands() -> None:
    """Run training two ways on every layout and prove that not one bit differs."""


@commands.command()
@click.argument("paths", type=_PATH, nargs=-1, metavar="[SCENARIO]...")
@_options(suite_options, _keyword, _jobs, _slots, _ranks_per_gpu, _device, _out, _exit_first, _json)
@_options(_engine, _history, _overrides, bisect_exit)
@click.option("--dry-run", is_flag=True, help="Print the plan, run nothing.")
@click.option("--resume", type=_PATH, metavar="RUN", help="Go on with a run folder.")
@click.option("--mixed", is_flag=True, help="With --resume: also by other code or packages.")
@click.option("--again-killed", is_flag=True, help="With --resume: whoever killed it.")
def run(
    *, sets: tuple[str, ...], axes: tuple[str, ...],
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
        database=database, no_history=no_history,
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
    database: Path | None, no_history: bool,
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


@commands.command()
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


@commands.command()
@_json
def doctor(*, as_json: bool) -> int:
    """Say what this machine can run, and what it lacks."""
    diagnosis = diagnose(describe(), DEFAULT_OUT)
    if as_json:
        click.echo(json.dumps(diagnosis.to_json(), allow_nan=False))
    else:
        display.print_diagnosis(display.make_console(), diagnosis)
    return ExitCode.PASSED if diagnosis.healthy else ExitCode.NO_VERDICT


for _command in (
    report_command, merge_command, show_command, list_command, history_command, compare_command,
    predict_command, check_command, bisect_command, faults_command, wrap_command,
    compare_runs_command,
):  # fmt: skip
    commands.add_command(_command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code, never an exception."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        with commands.make_context(program(), list(args), obj=args) as context:
            code = int(commands.invoke(context) or 0)
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.ClickException as error:
        code = _misused(error)
    except (KeyboardInterrupt, click.Abort):
        code = _say(Interrupted("interrupted"))
    except HarnessError as error:
        code = _say(error)
    except BrokenPipeError:
        # The reader has left (harness list | head): nothing to tell it, and nothing to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = ExitCode.PASSED
    except Exception as error:  # noqa: BLE001 - the one place where our own mistakes end
        code = _internal(error)
    return for_git(code, args)


def _misused(error: click.ClickException) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return ExitCode.USAGE
    path = getattr(getattr(error, "ctx", None), "command_path", program())
    return _say(UsageError(f"{error.format_message()} (see {path} -h)"))


def _say(error: HarnessError) -> int:
    # What is wrong with a value often quotes it.
    click.echo(f"harness: {Masker(os.environ).text(str(error))}", err=True)
    return error.exit_code


def _internal(error: Exception) -> int:
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="harness-", suffix=".txt", delete=False
        ) as file:
            file.write(Masker(os.environ).text(traceback.format_exc()))
        where = f" (traceback: {file.name})"
    except OSError:
        click.echo(Masker(os.environ).text(traceback.format_exc()), err=True)
        where = ""
    return _say(InternalError(f"internal error: {type(error).__name__}: {error}{where}"))
