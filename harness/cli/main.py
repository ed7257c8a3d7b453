"""The command line: `main` runs one command; each command's module is read when it is asked for.

Every error goes through `main`: one line on stderr and the exit code of `harness.errors`. With
`--json`, stdout holds one JSON value and everything for people goes to stderr.
"""

import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import NamedTuple

import click

from harness.cli.bisect_exit import for_git
from harness.errors import HarnessError, InternalError, Interrupted, UsageError
from harness.masking import Masker
from harness.records import ExitCode
from harness.typed import program

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
EXIT_CODES = "Exit codes: 0 passed, 1 a check failed, 2 interrupted, 3 internal, 4 usage, " \
    "5 nothing ran, 6 no verdict."  # fmt: skip
COMPLETE = "_HARNESS_COMPLETE"
"""A shell asks for completions by it: `eval "$(_HARNESS_COMPLETE=bash_source harness)"`."""


class _Place(NamedTuple):
    """Where a command is."""

    module: str
    attribute: str
    summary: str
    """What the first line of its help says, known without reading the module."""


SECTIONS: dict[str, dict[str, _Place]] = {
    "Run": {
        "run": _Place("harness.cli.run", "run", "Run scenario files and judge every case."),
        "rerun": _Place("harness.cli.run", "rerun", "Run one case again."),
        "list": _Place("harness.cli.suite", "list_command", "List scenarios and their cases."),
        "doctor": _Place("harness.cli.doctor", "doctor", "Say what this machine can run."),
    },
    "Look at a failure": {
        "show": _Place("harness.cli.report", "show_command", "Show one case."),
        "bisect": _Place("harness.cli.bisect", "bisect_command", "Find the cause of a failure."),
        "history": _Place(
            "harness.cli.history", "history_command", "Show earlier results of cases."
        ),
        "compare": _Place("harness.cli.history", "compare_command", "Compare two run folders."),
    },
    "Run folders": {
        "report": _Place("harness.cli.report", "report_command", "Write the reports again."),
        "check": _Place("harness.cli.check", "check_command", "Verify every checksum."),
        "merge": _Place("harness.cli.report", "merge_command", "Join the folders of shards."),
    },
    "Runs that something else starts": {
        "wrap": _Place("harness.cli.wrap", "wrap_command", "Record a job that a command starts."),
        "compare-runs": _Place(
            "harness.cli.compare_runs", "compare_runs_command", "Judge two recorded runs."
        ),
    },
    "Tests of the harness": {
        "faults": _Place("harness.cli.faults", "faults_command", "Plant known faults."),
    },
}


class Commands(click.Group):
    """A group whose commands are read one at a time."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, in the order of the help."""
        return [name for names in SECTIONS.values() for name in names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name."""
        for names in SECTIONS.values():
            if cmd_name in names:
                place = names[cmd_name]
                found = getattr(importlib.import_module(place.module), place.attribute)
                assert isinstance(found, click.Command)
                return found
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One line a command, by what they are for."""
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, place.summary) for name, place in names.items()])


def _show_version(context: click.Context, option: click.Parameter, value: object) -> None:
    if value and not context.resilient_parsing:
        from harness.provenance import package_version

        version = package_version("deltazero") or "of a source tree that is not installed"
        click.echo(f"harness {version}")
        context.exit()


@click.group(cls=Commands, context_settings=HELP, epilog=EXIT_CODES)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version,
    help="Show the version and exit.",
)  # fmt: skip
def commands() -> None:
    """Run training two ways on every layout and prove that not one bit differs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code, never an exception."""
    args = list(sys.argv[1:] if argv is None else argv)
    if COMPLETE in os.environ:
        commands.main(args, prog_name="harness", complete_var=COMPLETE)
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
