"""The command line: `harness run | list | report | show | rerun | doctor`.

Every error goes through `main`: one line on stderr and the exit code of `harness.errors`. With
`--json`, stdout holds one JSON value and everything for people goes to stderr.
"""

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from harness import display, launch
from harness.doctor import diagnose
from harness.errors import (
    HarnessError,
    InternalError,
    Interrupted,
    NothingSelected,
    UsageError,
)
from harness.listing import check_files, find_scenarios
from harness.machine import describe
from harness.matrix import expand
from harness.plan import Plan
from harness.progress import duration, make_view
from harness.records import CaseSpec, ExitCode, Verdict
from harness.schema import Overrides, load_scenario
from harness.select import select
from harness.store import RunFolder, load_case

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
_overrides = _options(
    click.option("--set", "sets", multiple=True, metavar="KEY=YAML", help="Replace a base value."),
    click.option("--axis", "axes", multiple=True, metavar="NAME=LIST", help="Replace an axis."),
)


@click.group(context_settings=HELP, epilog=EXIT_CODES)
def commands() -> None:
    """Run training two ways on every layout and prove that not one bit differs."""


@commands.command()
@click.argument("scenario", type=_PATH, required=False)
@_options(_keyword, _jobs, _slots, _ranks_per_gpu, _device, _out, _exit_first, _json, _overrides)
@click.option("--dry-run", is_flag=True, help="Print the plan, run nothing.")
@click.option("--resume", type=_PATH, metavar="RUN", help="Go on with a run folder.")
def run(
    *, scenario: Path | None, sets: tuple[str, ...], axes: tuple[str, ...],
    dry_run: bool, as_json: bool, **request: Any,
) -> int:  # fmt: skip
    """Run a SCENARIO file and report."""
    asked = launch.Request(scenario=scenario, overrides=Overrides(sets, axes), **request)
    prepared = launch.prepare(asked)
    if dry_run:
        return _show_plan(prepared.plan, as_json=as_json)
    return _carry_out(prepared, out=asked.out, exit_first=asked.exit_first, as_json=as_json)


def _show_plan(plan: Plan, *, as_json: bool) -> int:
    if as_json:
        click.echo(json.dumps(plan.to_json(), allow_nan=False))
    else:
        display.print_plan(display.make_console(), plan)
    if not plan.runs and len(plan.skipped) == len(plan.cases):
        return ExitCode.NOTHING_RAN
    return ExitCode.PASSED


def _carry_out(
    prepared: launch.Prepared, *, out: Path | None, exit_first: bool, as_json: bool
) -> int:
    from harness.checks.judge import exit_code

    console = display.make_console(stderr=as_json)
    done = launch.carry_out(
        prepared, make_view(console), out=out, exit_first=exit_first, argv=_command_line()
    )
    code = _final_code(exit_code(done.verdicts), done)
    console.print(display.verdict_table(done.verdicts))
    console.print(display.counts_line(done.verdicts, done.num_cases), end="")
    console.print(Text(f" in {duration(done.wall_s)}; run folder {done.folder}"), soft_wrap=True)
    # After the verdicts are told: a report that cannot be written must not swallow them.
    reports = _build_reports(done.folder)
    if "html" in reports:
        console.print(Text(f"report: {reports['html']}"), soft_wrap=True)
    if as_json:
        click.echo(json.dumps(_result(done, reports, code), allow_nan=False))
    return code


def _command_line() -> list[str]:
    args: list[str] = click.get_current_context().find_root().obj
    return ["harness", *args]


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
    }


def _build_reports(folder: Path) -> dict[str, Path]:
    # pandas and matplotlib come with it: only those who make a report wait for them.
    import reports

    return {name: Path(path) for name, path in reports.build(folder).items()}


@commands.command("list")
@click.argument("paths", type=_PATH, nargs=-1)
@_options(_keyword, _json, _overrides)
@click.option("--check", is_flag=True, help="Validate every file; say all that is wrong.")
@click.option("--count", is_flag=True, help="How many cases, not which.")
def list_cases(
    *, paths: tuple[Path, ...], keyword: str | None, as_json: bool, check: bool, count: bool,
    sets: tuple[str, ...], axes: tuple[str, ...],
) -> int:  # fmt: skip
    """List the cases of scenario files; of several files, their number and the time taken last.

    PATHS are files and folders, scenarios/ by default.
    """
    began = time.perf_counter()
    files = find_scenarios(paths or (Path("scenarios"),))
    overrides = Overrides(sets, axes)
    if check:
        return _check(files, overrides, as_json=as_json)
    found: dict[str, tuple[CaseSpec, ...]] = {}
    numbers: dict[str, int] = {}
    for file in files:
        scenario = load_scenario(file, overrides=overrides)
        if chosen := select(expand(scenario, "cpu"), keyword):
            numbers[str(file)] = len(chosen)
            found[str(file)] = () if count else chosen  # tens of thousands a file take memory
    if not found:
        raise NothingSelected("no case is selected")
    if as_json:
        plain = {name: [case.to_json() for case in cases] for name, cases in found.items()}
        click.echo(json.dumps(numbers if count else plain, allow_nan=False))
        return ExitCode.PASSED
    console = display.make_console()
    for name, cases in found.items():
        display.print_cases(console, name, cases, number=numbers[name])
    if len(files) > 1:
        seconds = time.perf_counter() - began
        click.echo(f"{sum(numbers.values())} cases in {len(found)} files, {seconds:.1f} s")
    return ExitCode.PASSED


def _check(files: Sequence[Path], overrides: Overrides, *, as_json: bool) -> int:
    checked = check_files(files, overrides)
    if as_json:
        click.echo(json.dumps([item.to_json() for item in checked], allow_nan=False))
    for item in checked:
        if item.error:
            click.echo(item.error, err=True)
        elif not as_json:
            click.echo(f"{item.file}: {item.num_cases} cases")
    return max((item.exit_code for item in checked), default=ExitCode.NOTHING_RAN)


@commands.command()
@click.argument("folder", type=_PATH, metavar="RUN")
@_json
def report(*, folder: Path, as_json: bool) -> int:
    """Build the reports of a RUN folder again."""
    built = _build_reports(RunFolder.open(folder).path)
    if as_json:
        click.echo(json.dumps({name: str(path) for name, path in built.items()}))
    else:
        for name, path in built.items():
            click.echo(f"{name}: {path}")
    return ExitCode.PASSED


@commands.command()
@click.argument("case")
@click.argument("folder", type=_PATH, metavar="[RUN]", required=False)
@_json
def show(*, case: str, folder: Path | None, as_json: bool) -> int:
    """Show one case: verdict, first difference, exits.

    CASE is a case folder, or an id in RUN (the newest run under out/ by default).
    """
    place, spec = launch.find_case(case, folder)
    verdict = _stored_verdict(place, spec)
    if as_json:
        plain = {
            "case": spec.to_json(),
            "folder": str(place),
            "verdict": verdict.to_json() if verdict else None,
        }
        click.echo(json.dumps(plain, allow_nan=False))
        return ExitCode.PASSED
    legs = {}
    if (place / "case.json").is_file():
        runs = load_case(place)
        for leg in ("reference", "control", "candidate"):
            legs[leg] = (place / leg, getattr(runs, leg))
    display.print_case(display.make_console(), spec, verdict, legs)
    return ExitCode.PASSED


def _stored_verdict(place: Path, case: CaseSpec) -> Verdict | None:
    try:
        verdict = Verdict.from_json(json.loads((place / "verdict.json").read_bytes()))
    except (OSError, ValueError):
        return None
    return verdict if verdict.case_id == case.id else None


@commands.command()
@click.argument("case")
@click.argument("folder", type=_PATH, metavar="[RUN]", required=False)
@_options(_out, _slots, _ranks_per_gpu, _jobs, _json)
def rerun(*, case: str, folder: Path | None, out: Path | None, as_json: bool, **room: Any) -> int:
    """Run one case again.

    CASE is a case folder, which is all that is needed, or an id in RUN (the newest under out/).
    """
    place, _ = launch.find_case(case, folder)
    prepared = launch.prepare_rerun(place, **room)
    return _carry_out(prepared, out=out, exit_first=False, as_json=as_json)


@commands.command()
@_json
def doctor(*, as_json: bool) -> int:
    """Say what this machine can run, and what it lacks."""
    diagnosis = diagnose(describe(), launch.DEFAULT_OUT)
    if as_json:
        click.echo(json.dumps(diagnosis.to_json(), allow_nan=False))
    else:
        display.print_diagnosis(display.make_console(), diagnosis)
    return ExitCode.PASSED if diagnosis.healthy else ExitCode.NO_VERDICT


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code, never an exception."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        with commands.make_context("harness", list(args), obj=args) as context:
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
    return int(code)


def _misused(error: click.ClickException) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return ExitCode.USAGE
    path = getattr(getattr(error, "ctx", None), "command_path", "harness")
    return _say(UsageError(f"{error.format_message()} (see {path} -h)"))


def _say(error: HarnessError) -> int:
    click.echo(f"harness: {error}", err=True)
    return error.exit_code


def _internal(error: Exception) -> int:
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="harness-", suffix=".txt", delete=False
        ) as file:
            file.write(traceback.format_exc())
        where = f" (traceback: {file.name})"
    except OSError:
        traceback.print_exc()
        where = ""
    return _say(InternalError(f"internal error: {type(error).__name__}: {error}{where}"))
