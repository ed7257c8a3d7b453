"""`harness check RUN`: is a run folder as it was written, and do its verdicts stand?"""

import dataclasses
import json
from pathlib import Path

import click

from harness.checks import exit_code
from harness.checks.evidence import count
from harness.inspection import Inspection, inspect
from harness.records import ExitCode

MAX_LINES = 20
"""Lines of damage, and cases without a verdict, that are printed; the rest is counted."""


@click.command("check")
@click.argument("folder", type=click.Path(path_type=Path), metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
def check_command(*, folder: Path, as_json: bool) -> int:
    """Check every file of a RUN folder against its checksum and judge every pass again.

    Exit codes as those of the run itself; 6 if it passed and files are damaged.
    """
    found = inspect(folder)
    code = code_of(found)
    if as_json:
        plain = dataclasses.asdict(found) | {"exit_code": int(code)}
        click.echo(json.dumps(plain, allow_nan=False))
        return code
    tell_damage(found)
    state = f"{len(found.damage)} damaged" if found.damage else "all files as they were written"
    if found.unjudged:
        whole = state if found.damage else "no file damaged"
        state = f"{whole}, {count(len(found.unjudged), 'case')} without a verdict"
    click.echo(f"{count(found.num_cases, 'case')}, {count(found.num_runs, 'run')}: {state}")
    return code


def tell_damage(found: Inspection) -> None:
    """A line on stderr for each damaged file and each case without a verdict, a readable number."""
    for word, lines, what in (
        ("damaged", found.damage, "files"), ("no verdict", found.unjudged, "cases"),
    ):  # fmt: skip
        for line in lines[:MAX_LINES]:
            click.echo(f"harness: {word}: {line}", err=True)
        if len(lines) > MAX_LINES:
            click.echo(f"harness: {word}: {len(lines) - MAX_LINES} more {what}", err=True)


def code_of(found: Inspection) -> ExitCode:
    """What the verdicts say, but no pass of a folder that is damaged or not finished."""
    code = exit_code(found.verdicts)
    if code in (ExitCode.PASSED, ExitCode.NOTHING_RAN) and (found.damage or found.unjudged):
        return ExitCode.NO_VERDICT
    return code
