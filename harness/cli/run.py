"""`harness run, rerun`, and of the folders that they make `report, check, merge, show, safety`."""

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from harness import cli
from harness.checks import exit_code, judge
from harness.checks.evidence import count
from harness.cli import PATH, print_json
from harness.errors import HarnessError, UsageError, one_line
from harness.history.ledger import HISTORY_FOLDER, remember
from harness.masking import Masker
from harness.records import CaseSpec, ExitCode, Verdict
from harness.repeats import past_legs, runs_of
from harness.runner import launch
from harness.runner.run import held_against_attempts, set_killed_aside
from harness.scenario.schema import ENGINES, Overrides
from harness.store import LEGS, VERDICT_FILE, RunFolder, load_run_folder
from harness.store.folder import (
    DEFAULT_OUT,
    Inspection,
    bisect_line,
    find_answer,
    find_case,
    inspect,
    unused,
)
from harness.store.merge import merge
from harness.terminal import (
    counts_line,
    duration,
    make_console,
    make_view,
    print_case,
    print_line,
    print_outcome,
    print_plan,
    typed,
)

MAX_LINES = 20
"""Lines of damage, and cases without a verdict, that are printed; the rest is counted."""
Reports = dict[str, Path]
"""By format."""


def build_reports(folder: Path, database: Path | None = None) -> Reports:
    """Write the reports of a run folder."""
    # jinja2 and more come with it: only those who make a report wait for them.
    import reports

    # Where GitHub Actions wants the summary of the step that runs us.
    step = os.environ.get("GITHUB_STEP_SUMMARY")
    return reports.build(folder, history=database, step=Path(step) if step else None)


def report_again(
    console: Console, folder: Path, code: ExitCode, database: Path | None = None
) -> tuple[Reports, ExitCode]:
    """`build_reports`, print where the page is, and return the exit code, which was `code`.

    A report that cannot be written changes no exit code but that of a pass, to `NO_VERDICT`.
    """
    try:
        reports = build_reports(folder, database)
    except HarnessError as error:
        click.echo(f"harness: no report: {Masker(os.environ).text(str(error))}", err=True)
        return {}, code or ExitCode.NO_VERDICT
    if "html" in reports:
        print_line(console, f"report: {reports['html']}")
    return reports, code


def as_text(reports: Reports) -> dict[str, str]:
    """For JSON."""
    return {name: str(path) for name, path in reports.items()}


def open_page(reports: Reports) -> None:
    """Open the page in a browser; one line where there is none, which fails nothing."""
    page = reports.get("html")
    if page is not None and click.launch(str(page.absolute())):
        click.echo(f"harness: no browser could open {page}", err=True)


@click.command("report")
@click.argument("folder", type=PATH, metavar="RUN")
@cli.opens
@cli.as_json
def report_command(*, folder: Path, opens: bool, as_json: bool) -> int:
    """Write the reports of a RUN folder again.

    Exit code 0 whatever they say; 6 if files are damaged or cases have no verdict.
    """
    built = build_reports(RunFolder.open(folder).path)
    found = inspect(folder)
    show_damage(found)
    if as_json:
        print_json(as_text(built))
    else:
        click.echo("\n".join(f"{name}: {path}" for name, path in built.items()))
    if opens:
        open_page(built)
    return ExitCode.NO_VERDICT if found.damage or found.unjudged else ExitCode.PASSED


@click.command("check")
@click.argument("folder", type=PATH, metavar="RUN")
@cli.as_json
def check_command(*, folder: Path, as_json: bool) -> int:
    """Check every file of a RUN folder against its checksum and judge every pass again.

    Exit codes as those of the run itself; 6 if it passed and files are damaged.
    """
    found = judged_again(folder)
    code = code_of(found)
    if as_json:
        print_json(asdict(found) | {"exit_code": int(code)})
        return code
    show_damage(found)
    whole = "no file damaged" if found.unjudged else "all files as they were written"
    state = f"{len(found.damage)} damaged" if found.damage else whole
    if found.unjudged:
        state += f", {count(len(found.unjudged), 'case')} without a verdict"
    click.echo(f"{count(found.num_cases, 'case')}, {count(found.num_runs, 'run')}: {state}")
    return code


@click.command("merge")
@click.argument("folders", type=PATH, nargs=-1, required=True, metavar="RUN...")
@cli.out
@cli.as_json
def merge_command(*, folders: tuple[Path, ...], out: Path | None, as_json: bool) -> int:
    """Put the RUN folders of shards together into one, and report.

    A shard that is missing shows: its cases are errors. Exit codes as those of a run.
    """
    place = out or unused(DEFAULT_OUT / "merged")
    with merge(folders, place, cli.command_line()) as merged:
        found = judged_again(place)
    console = make_console(stderr=as_json)
    for note in merged.manifest["notes"]:
        print_line(console, note)
    console.print(counts_line(found.verdicts, found.num_cases), end="")
    print_line(console, f"; run folder {merged.path}")
    show_damage(found)
    reports, code = report_again(console, merged.path, code_of(found))
    if as_json:
        print_json({"exit_code": int(code), "folder": str(merged.path),
                    "reports": as_text(reports)})  # fmt: skip
    return code


@click.command("show")
@click.argument("case")
@click.argument("folder", type=PATH, metavar="[RUN]", required=False)
@cli.as_json
def show_command(*, case: str, folder: Path | None, as_json: bool) -> int:
    """Show one case: verdict, first difference, exits.

    CASE is a case folder, or an id in RUN (the newest run under out/ by default). Exit code 0
    whatever the verdict says; 6 if there is none that can be read.
    """
    place, spec, verdict, why = find_answer(case, folder)
    if as_json:
        print_json({"case": spec.to_json(), "folder": str(place), "why": why,
                    "verdict": verdict.to_json() if verdict else None})  # fmt: skip
    else:
        runs = {role: (place / role, load_run_folder(place / role, getattr(spec, role)))
                for role in LEGS if (place / role).is_dir()}  # fmt: skip
        print_case(make_console(), spec, verdict, runs, why=why)
    return ExitCode.PASSED if verdict else ExitCode.NO_VERDICT


@click.command("safety")
@click.argument("folders", type=PATH, nargs=-1, required=True, metavar="RUN...")
@cli.as_json
def safety_command(*, folders: tuple[Path, ...], as_json: bool) -> int:
    """Show which release is safe in which combination, from RUN folders, as Markdown.

    Counts cases of scenarios that have the key `about`. Exit code 0 whatever they say; 5 if no
    scenario has it.
    """
    import reports

    found, text = reports.tables_of_safety(reports.summarise(folder) for folder in folders)
    if as_json:
        print_json(found)
    elif found:
        click.echo(text)
    else:
        click.echo("harness: no scenario of these folders has the key about", err=True)
    return ExitCode.PASSED if found else ExitCode.NOTHING_RAN


# --- whole folders ----------------------------------------------------------------------------


def judged_again(path: Path) -> Inspection:
    """A run folder, every checksum tried and every pass judged again from its records.

    For folders from elsewhere: files may say something else than they did and carry checksums that
    fit. What records say otherwise than the verdict is damage of the verdict. `UsageError`: it is
    not a run folder, or damaged beyond reading.
    """
    found, folder = inspect(path), RunFolder.open(path)
    cases = {case.id: case for case in folder.cases}
    verdicts, damage = [], list(found.damage)
    for stored in found.verdicts:
        case, verdict = cases[stored.case_id], stored
        if stored.outcome in ("passed", "skipped") and not case.skip_reason:
            verdict = _judged(folder, case)
        if verdict.outcome != stored.outcome:
            file = folder.case_folder(case.id).relative_to(folder.path) / VERDICT_FILE
            damage.append(f"{file}: says {stored.outcome}, but: {verdict.message}")
            stored = verdict
        verdicts.append(stored)
    return replace(found, verdicts=tuple(verdicts), damage=tuple(damage))


def _judged(folder: RunFolder, case: CaseSpec) -> Verdict:
    places = {getattr(case, role).key: folder.leg_folder(case, role) for role in LEGS}
    runs = [load_run_folder(places.get(spec.key) or folder.run_folder(spec.key), spec)
            for spec in runs_of(case)]  # fmt: skip
    samples, repeats = past_legs(case, runs)
    try:
        found = judge(case, *runs[:3], samples=samples, repeats=repeats)
    except Exception as error:  # noqa: BLE001 - what a forged plan can lead to has no end
        why = one_line(f"{type(error).__name__}: {error}")
        why = f"its plan cannot be judged: {why}"
        return Verdict(case_id=case.id, outcome="error", what="corrupt_record", message=why)
    return held_against_attempts(folder, case, found)


def show_damage(found: Inspection) -> None:
    """A line on stderr for each damaged file and each case without a verdict, a readable number."""
    kinds: dict[tuple[str, str], Sequence[str]] = {
        ("damaged", "files"): found.damage, ("no verdict", "cases"): found.unjudged,
    }  # fmt: skip
    for (word, what), lines in kinds.items():
        more = [f"{len(lines) - MAX_LINES} more {what}"] * (len(lines) > MAX_LINES)
        for line in (*lines[:MAX_LINES], *more):
            click.echo(f"harness: {word}: {line}", err=True)


def code_of(found: Inspection) -> ExitCode:
    """What the verdicts say, but no pass of a folder that is damaged or not finished."""
    code = exit_code(found.verdicts)
    if code in (ExitCode.PASSED, ExitCode.NOTHING_RAN) and (found.damage or found.unjudged):
        return ExitCode.NO_VERDICT
    return code


_history = cli.options(
    click.option(
        "--history", "database", type=PATH, metavar="FOLDER",
        help=f"Record results in this folder; by default {HISTORY_FOLDER} next to the run folder.",
    ),
    click.option("--no-history", is_flag=True, help="Do not record results in a history."),
)  # fmt: skip


@click.command()
@click.argument("paths", type=PATH, nargs=-1, metavar="[SCENARIO]...")
@cli.options(cli.chosen, cli.keyword, cli.room, cli.device, cli.out)
@click.option("-x", "exit_first", is_flag=True, help="Stop at the first failed case.")
@cli.as_json
@click.option(
    "--engine", type=click.Choice(ENGINES),
    help="Start runs here or on the nodes of the Slurm job around it; overrides launch.engine.",
)  # fmt: skip
@click.option("--slurm", multiple=True, metavar="KEY=YAML",
              help="Replace a value of launch.slurm, as nodes=2.")  # fmt: skip
@cli.options(_history, cli.overrides, cli.bisect_exit, cli.opens)
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
    if again_killed and (wanted.resume is None or dry_run):
        raise UsageError("--again-killed: expected --resume RUN with it, and no --dry-run")
    prepared = launch.prepare(wanted)
    if again_killed and wanted.resume is not None:  # only now is it known that they can be made
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
@cli.options(cli.out, cli.room, cli.as_json, _history, cli.bisect_exit)
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
            argv=cli.command_line(),
        )  # fmt: skip
    except launch.CutShort as error:
        _show_cut_short(console, error, database, as_json=as_json)
        raise
    code = exit_code(done.verdicts)
    if code == ExitCode.PASSED and len(done.verdicts) < done.num_cases:
        code = ExitCode.NO_VERDICT  # a case without a verdict is not a pass
    _show_outcome(console, done)
    cases = {case.id: case for case in prepared.plan.cases}
    searches = (bisect_line(cases[each.case_id], each, done.folder / "cases" / each.case_id)
                for each in sorted(done.verdicts, key=lambda v: v.outcome != "failed"))  # fmt: skip
    if command := next(filter(None, searches), ""):
        print_line(console, f"find the cause: {typed(command)}")
    history = database or done.folder.parent / HISTORY_FOLDER
    if not no_history and (warning := remember(done.folder, history)):
        click.echo(f"harness: {warning}", err=True)
    reports, code = report_again(console, done.folder, code, database)
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
    done, reports = cut.done, Reports()
    _show_outcome(console, done)
    try:
        if done.verdicts:
            # Of hundreds of cases it takes a while, which must not look like a harness that hangs.
            console.print("interrupted: writing the report, one more Ctrl-C leaves it out")
            reports, _ = report_again(console, done.folder, cut.exit_code, database)
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
