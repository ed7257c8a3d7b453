"""The command line: `main` runs one command; each command's module is read when it is needed.

Every error goes through `main`: one line on stderr and the exit code of `harness.errors`. With
`--json`, stdout holds one JSON value and everything for people goes to stderr.
"""

import errno
import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

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
from harness.values import SELECTIONS, TIERS

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
    return for_git(code, args)


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


# --- options that several commands take, and what they share otherwise ----------------------------

PATH = click.Path(path_type=Path)
Command = Callable[..., Any]
Option = Callable[[Command], Command]
BISECT_EXIT = "--bisect-exit"


def options(*each: Option) -> Option:
    """Several options as one decorator."""

    def wrap(function: Command) -> Command:
        for option in reversed(each):
            function = option(function)
        return function

    return wrap


as_json = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON value on stdout; messages go to stderr."
)
opens = click.option("--open", "opens", is_flag=True, help="Open the report page in a browser.")
keyword = click.option(
    "-k", "keyword", metavar="EXPR",
    help="Only cases whose id or labels match, as in pytest: 'dp2 and not attn'.",
)  # fmt: skip
out = click.option(
    "--out", type=PATH, metavar="FOLDER",
    help="Run folder to create; by default a new one under out/.",
)  # fmt: skip
device = click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]),
    help="Device of every run; overrides launch.device.",
)  # fmt: skip
sets = click.option(
    "--set", "sets", multiple=True, metavar="KEY=YAML",
    help="Replace a value of base, as fsdp.strategy=no_shard.",
)  # fmt: skip
overrides = options(
    sets,
    click.option("--axis", "axes", multiple=True, metavar="NAME=LIST",
                 help="Replace the values of an axis, as graph=[eager,[attn]]."),
)  # fmt: skip
chosen = options(
    click.option(
        "--tier", "tiers", type=click.Choice(TIERS), multiple=True,
        help="Only scenarios of this tier; of those under scenarios/ if no path is given.",
    ),
    click.option(
        "--select", type=click.Choice(SELECTIONS),
        help="Which cases: all, or a set that covers all pairs of values. Overrides the scenario's "
        "select.",
    ),
    click.option("--shard", metavar="I/N",
                 help="Only shard I of N, for CI jobs in parallel; see harness merge."),
)  # fmt: skip
room = options(
    click.option("--jobs", type=click.IntRange(1), metavar="N",
                 help="At most N runs at the same time; by default as many as fit the slots."),
    click.option("--slots", type=click.IntRange(1), metavar="N",
                 help="At most N ranks at the same time; by default one a GPU, on the CPU two a "
                 "core and at least 8."),
    click.option("--ranks-per-gpu", type=click.IntRange(1), metavar="N",
                 help="Let N ranks share a GPU, to run layouts that need more GPUs; times are then "
                 "meaningless."),
)  # fmt: skip
bisect_exit = click.option(
    BISECT_EXIT, is_flag=True, expose_value=False,
    help="Exit as git bisect run expects: 0 good, 1 bad, 125 skip, above 127 stop.",
)  # fmt: skip


def print_json(value: Any) -> None:
    """One JSON value on stdout."""
    click.echo(json.dumps(value, allow_nan=False))


def for_git(code: int, args: Sequence[str]) -> int:
    """The exit code of a command line: ours, or with --bisect-exit that of `git bisect run`.

    0 good, 1 bad; 125 skips a commit on which nothing ran or that has no verdict; from 128 on the
    search stops, as the next commit would end the same.
    """
    if BISECT_EXIT not in args or code in (ExitCode.PASSED, ExitCode.FAILED):
        return int(code)
    return 128 + int(code) if code in (ExitCode.INTERRUPTED, ExitCode.USAGE) else 125


def command_line() -> list[str]:
    """What was typed, for manifests; secrets masked."""
    args: list[str] = click.get_current_context().find_root().obj
    return ["harness", *Masker(os.environ).words(args)]
