"""`harness check RUN`: is a run folder as it was written, and do its verdicts hold?"""

from dataclasses import asdict, replace
from pathlib import Path

import click

from harness.checks import exit_code, judge
from harness.checks.evidence import count
from harness.cli import options
from harness.errors import one_line
from harness.records import CaseSpec, ExitCode, Verdict
from harness.repeats import past_legs, runs_of
from harness.runner.retries import held_against_attempts
from harness.store import LEGS, VERDICT_FILE, RunFolder, load_run_folder
from harness.store.verify import Inspection, inspect

MAX_LINES = 20
"""Lines of damage, and cases without a verdict, that are printed; the rest is counted."""


@click.command("check")
@click.argument("folder", type=options.PATH, metavar="RUN")
@options.as_json
def check_command(*, folder: Path, as_json: bool) -> int:
    """Check every file of a RUN folder against its checksum and judge every pass again.

    Exit codes as those of the run itself; 6 if it passed and files are damaged.
    """
    found = judged_again(folder)
    code = code_of(found)
    if as_json:
        options.print_json(asdict(found) | {"exit_code": int(code)})
        return code
    show_damage(found)
    whole = "no file damaged" if found.unjudged else "all files as they were written"
    state = f"{len(found.damage)} damaged" if found.damage else whole
    if found.unjudged:
        state += f", {count(len(found.unjudged), 'case')} without a verdict"
    click.echo(f"{count(found.num_cases, 'case')}, {count(found.num_runs, 'run')}: {state}")
    return code


def judged_again(path: Path) -> Inspection:
    """A run folder, every checksum tried and every pass judged again from its records.

    For folders from elsewhere: files may say something else than they did and carry checksums that
    fit. What records say otherwise than the verdict is damage of the verdict.

    Raises:
        UsageError: it is not a run folder, or damaged beyond reading.
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
        return Verdict(
            case_id=case.id, outcome="error", what="corrupt_record", checks=(), wall_s=0.0,
            message=f"its plan cannot be judged: {why}", runs={},
        )  # fmt: skip
    return held_against_attempts(folder, case, found)


def show_damage(found: Inspection) -> None:
    """A line on stderr for each damaged file and each case without a verdict, a readable number."""
    kinds = (("damaged", found.damage, "files"), ("no verdict", found.unjudged, "cases"))
    for word, lines, what in kinds:
        more = [f"{len(lines) - MAX_LINES} more {what}"] if len(lines) > MAX_LINES else []
        for line in (*lines[:MAX_LINES], *more):
            click.echo(f"harness: {word}: {line}", err=True)


def code_of(found: Inspection) -> ExitCode:
    """What the verdicts say, but no pass of a folder that is damaged or not finished."""
    code = exit_code(found.verdicts)
    if code in (ExitCode.PASSED, ExitCode.NOTHING_RAN) and (found.damage or found.unjudged):
        return ExitCode.NO_VERDICT
    return code
