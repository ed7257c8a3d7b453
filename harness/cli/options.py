"""Options that several commands take, and what they share otherwise."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from harness.masking import Masker
from harness.records import ExitCode
from harness.scenario.schema import SELECTIONS, TIERS

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
suite = options(
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
