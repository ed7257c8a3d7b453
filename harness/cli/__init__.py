"""The command line: `main` runs one command; each command's module is read when it is needed.

Every error goes through `main`: one line on stderr and the exit code of `harness.errors`. With
`--json`, stdout holds one JSON value and everything for people goes to stderr.
"""

import errno
import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress

import click

from harness.errors import (
    HarnessError,
    Infrastructure,
    InternalError,
    Interrupted,
    UsageError,
    shown,
)
from harness.masking import Masker
from harness.records import ExitCode

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
EXIT_CODES = "Exit codes: 0 passed, 1 a check failed, 2 interrupted, 3 internal, 4 usage, " \
    "5 nothing ran, 6 no verdict."  # fmt: skip
COMPLETE = "_HARNESS_COMPLETE"
"""A shell asks for completions by it: `eval "$(_HARNESS_COMPLETE=bash_source harness)"`."""
SECTIONS = {
    "Run": {
        "run": ("run:run", "Run scenario files and judge every case."),
        "rerun": ("run:rerun", "Run one case again."),
        "list": ("suite:list_command", "List scenarios and their cases."),
        "doctor": ("suite:doctor", "Say what this machine can run."),
    },
    "Look at a failure": {
        "show": ("run:show_command", "Show one case."),
        "bisect": ("bisect:bisect_command", "Find the cause of a failure."),
        "history": ("history:history_command", "Show earlier results of cases."),
        "compare": ("history:compare_command", "Compare two run folders."),
    },
    "Run folders": {
        "report": ("run:report_command", "Write the reports again."),
        "check": ("run:check_command", "Verify every checksum."),
        "merge": ("run:merge_command", "Join the folders of shards."),
        "safety": ("run:safety_command", "Show which release is safe for what."),
    },
    "Runs that something else starts": {
        "wrap": ("wrap:wrap_command", "Record a job that a command starts."),
        "compare-runs": ("compare_runs:compare_runs_command", "Judge two recorded runs."),
        "diff": ("compare_runs:diff_command", "Find the first difference of two recordings."),
    },
    "Tests of the harness": {"faults": ("faults:faults_command", "Plant known faults.")},
}
"""By name: module and attribute, and a summary that is known without reading the module."""
COMMANDS = {name: place for names in SECTIONS.values() for name, (place, _) in names.items()}


class Commands(click.Group):
    """A group whose commands are read one at a time."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        found: click.Command = getattr(importlib.import_module(f"harness.cli.{module}"), attribute)
        found.epilog = found.epilog or EXIT_CODES
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, summary) for name, (_, summary) in names.items()])


def _show_version(context: click.Context, option: click.Parameter, value: object) -> None:
    if value and not context.resilient_parsing:
        from harness.provenance import package_version

        version = package_version("deltazero") or "of a source tree that is not installed"
        click.echo(f"harness {version}")
        context.exit()


@click.group(cls=Commands, context_settings=HELP, epilog=EXIT_CODES)
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version,
              help="Show the version and exit.")  # fmt: skip
def commands() -> None:
    """Run training two ways on every layout and prove that not one bit differs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code, never an exception."""
    args = list(sys.argv[1:] if argv is None else argv)
    if COMPLETE in os.environ:
        commands.main(args, prog_name="harness", complete_var=COMPLETE)
    try:
        with commands.make_context("harness", list(args), obj=args) as context:
            code = int(commands.invoke(context) or 0)
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        code = ExitCode.USAGE
    except click.ClickException as error:
        path = getattr(getattr(error, "ctx", None), "command_path", "harness")
        code = _say(UsageError(f"{error.format_message()} (see {path} -h)"))
    except (KeyboardInterrupt, click.Abort):
        code = _say(Interrupted("interrupted"))
    except HarnessError as error:
        code = _say(error)
    except Exception as error:  # noqa: BLE001 - the one place where our own mistakes end
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # somebody typed it
            code = _say(UsageError(f"expected a path, got {shown(error.filename)}: too long"))
        else:
            code = _internal(error)
    if "--bisect-exit" in args:
        from harness.cli.options import for_git

        return for_git(code, args)
    return int(code)


def _say(error: HarnessError) -> ExitCode:
    with suppress(Infrastructure):  # stderr on a full disk: the exit code says it all the same
        # What is wrong with a value often quotes it.
        click.echo(f"harness: {Masker(os.environ).text(str(error))}", err=True)
    return error.exit_code


def _internal(error: Exception) -> ExitCode:
    trace = Masker(os.environ).text(traceback.format_exc())
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="harness-", suffix=".txt", delete=False
        ) as file:
            file.write(trace)
        where = f" (traceback: {file.name})"
    except OSError:
        click.echo(trace, err=True)
        where = ""
    return _say(InternalError(f"internal error: {type(error).__name__}: {error}{where}"))
