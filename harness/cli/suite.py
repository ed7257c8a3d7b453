"""Options that say what is run together, and `harness list`."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from harness.checks import table
from harness.checks.evidence import count as counted
from harness.errors import NothingSelected, UsageError
from harness.records import CaseSpec, ExitCode
from harness.runner.shards import MAX_SHARDS, cut, parts, refuse_changed, take_shard
from harness.scenario.matrix import count as number_of_cases
from harness.scenario.matrix import expand
from harness.scenario.schema import Overrides, load_scenario
from harness.scenario.sections import SELECTIONS, TIERS
from harness.scenario.selection import select
from harness.scenario.suite import check_files, find_scenarios, load_suite

_PATH = click.Path(path_type=Path)
Command = Callable[..., Any]

OPTIONS: tuple[Callable[[Command], Command], ...] = (
    click.option(
        "--tier", "tiers", type=click.Choice(TIERS), multiple=True,
        help="Only scenarios of this tier; of those under scenarios/ if no path is given.",
    ),
    click.option(
        "--select", type=click.Choice(SELECTIONS),
        help="Which cases: all, a set that covers all pairs of values, or those whose code changed "
        "since the history's last pass. Overrides the scenario's select.",
    ),
    click.option(
        "--shard", metavar="I/N",
        help="Only shard I of N, for CI jobs in parallel; see harness merge.",
    ),
    click.option(
        "--costs", type=_PATH, metavar="FILE",
        help="Balance shards by the times in this history; give every shard the same file.",
    ),
)  # fmt: skip
DEFAULT_PATHS = (Path("scenarios"),)


def suite_options(function: Command) -> Command:
    """Add the options to a command."""
    for option in reversed(OPTIONS):
        function = option(function)
    return function


def _print_checks(context: click.Context, _: click.Parameter, wanted: Any) -> None:
    if wanted:
        click.echo("\n".join(table()))
        context.exit(ExitCode.PASSED)


@click.command("list")
@click.argument("paths", type=_PATH, nargs=-1)
@click.option(
    "-k", "keyword", metavar="EXPR", help="Only cases whose id or labels match, as in pytest."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON value on stdout; messages go to stderr."
)
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=YAML",
    help="Replace a value of base, as fsdp.strategy=no_shard.",
)
@click.option(
    "--axis",
    "axes",
    multiple=True,
    metavar="NAME=LIST",
    help="Replace the values of an axis, as graph=[eager,[attn]].",
)
@suite_options
@click.option(
    "--shards", type=click.IntRange(1, MAX_SHARDS), metavar="N",
    help="Print what each of N shards would run; with --json, a job matrix for CI.",
)  # fmt: skip
@click.option(
    "--checks", is_flag=True, is_eager=True, expose_value=False, callback=_print_checks,
    help="Print the checks that a scenario may ask for, and their options.",
)  # fmt: skip
@click.option(
    "--check", is_flag=True, help="Validate every case of every file and print every error."
)
@click.option("--count", is_flag=True, help="Print the number of cases only.")
def list_command(
    *, paths: tuple[Path, ...], keyword: str | None, as_json: bool, check: bool, count: bool,
    sets: tuple[str, ...], axes: tuple[str, ...], shards: int | None, **suite: Any,
) -> int:  # fmt: skip
    """List the cases of a scenario file; of several files, how many each has.

    PATHS are files and folders, scenarios/ by default. With -k, --json, --tier, --select or --shard
    the cases of several files are listed, too; the last three are those of `harness run`. Counts
    alone do not check that each case is legal: --check does.
    """
    overrides = Overrides(sets, axes)
    if check:
        return _check(find_scenarios(paths or DEFAULT_PATHS), overrides, as_json=as_json)
    if shards is not None or any(suite[name] for name in ("tiers", "select", "shard")):
        if shards is not None and suite["shard"] is not None:
            raise UsageError(
                f"list --shards {shards}: expected no --shard {suite['shard']} with it"
            )
        asked = _Asked(paths or DEFAULT_PATHS, keyword, overrides, cut=shards is not None, **suite)
        return asked.show_shards(shards, as_json=as_json) if shards else asked.show(
            as_json=as_json, count=count
        )  # fmt: skip
    files = find_scenarios(paths or DEFAULT_PATHS)
    if not keyword and (count or (len(files) > 1 and not as_json)):
        return _count_all(files, overrides, as_json=as_json)
    return _list_all(files, overrides, keyword, as_json=as_json, count=count)


def _count_all(files: Sequence[Path], overrides: Overrides, *, as_json: bool) -> int:
    numbers = {
        str(file): number_of_cases(load_scenario(file, overrides=overrides)) for file in files
    }
    if as_json:
        click.echo(json.dumps(numbers))
        return ExitCode.PASSED
    width = len(f"{max(numbers.values()):,}")
    click.echo(
        "".join(f"{number:{width},}  {name}\n" for name, number in numbers.items()), nl=False
    )
    if len(files) > 1:
        total = counted(sum(numbers.values()), "case")
        click.echo(f"{total} in {len(files)} files; `harness list FILE` names its cases")
    return ExitCode.PASSED


def _list_all(
    files: Sequence[Path], overrides: Overrides, keyword: str | None, *, as_json: bool, count: bool
) -> int:
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
    from harness.runner.display import make_console, print_cases  # a count alone does without

    console = make_console()
    for name, cases in found.items():
        print_cases(console, name, cases, number=numbers[name])
    if len(files) > 1:
        click.echo(f"{counted(sum(numbers.values()), 'case')} in {len(found)} files")
    return ExitCode.PASSED


class _Asked:
    """What `harness run` would choose of these paths."""

    def __init__(
        self, paths: tuple[Path, ...], keyword: str | None, overrides: Overrides, *, cut: bool,
        tiers: tuple[str, ...], select: str | None, shard: str | None, costs: Path | None,
    ) -> None:  # fmt: skip
        if select == "changed":
            raise UsageError("list --select changed: expected harness run, which has a history")
        suite = load_suite(paths, tiers=tiers, overrides=overrides)
        self.name, self.costs = suite.name, costs
        # A list asks no history: what has changed is known when it is run.
        self.cases, self.told = suite.cases(
            "cpu", forced=True, keyword=keyword, how=select,
            changed=refuse_changed if cut or shard else tuple,
        )  # fmt: skip
        if shard is not None:
            from harness.runner.expectations import expected_anywhere

            self.cases, _ = take_shard(self.cases, shard, expected_anywhere(costs))

    def show(self, *, as_json: bool, count: bool) -> int:
        if as_json:
            plain = [case.to_json() for case in self.cases]
            click.echo(
                json.dumps({self.name: len(plain) if count else plain}, allow_nan=False)
            )  # fmt: skip
            return ExitCode.PASSED
        from harness.runner.display import make_console, print_cases

        shown = () if count else self.cases
        print_cases(make_console(), self.name, shown, number=len(self.cases))
        for note in filter(None, (part.note() for part in self.told)):
            click.echo(note)
        return ExitCode.PASSED

    def show_shards(self, number: int, *, as_json: bool) -> int:
        """A line a shard that holds cases; as JSON, `{"include": [...]}` as GitHub takes it."""
        from harness.runner.expectations import expected_anywhere

        seconds = expected_anywhere(self.costs)
        found = parts(cut(self.cases, number, seconds), seconds)
        if as_json:
            click.echo(json.dumps({"include": [part.to_json() for part in found]}))
            return ExitCode.PASSED
        for part in found:
            click.echo(
                f"--shard {part.shard}: {counted(part.cases, 'case')}, "
                f"{counted(part.runs, 'run')}, about {part.expected_slot_s:.0f} s of one slot"
            )
        return ExitCode.PASSED


def _check(files: Sequence[Path], overrides: Overrides, *, as_json: bool) -> int:
    checked = check_files(files, overrides)
    if as_json:
        click.echo(json.dumps([item.to_json() for item in checked], allow_nan=False))
    for item in checked:
        if item.error:
            click.echo(item.error, err=True)
        elif not as_json:
            click.echo(f"{item.file}: {counted(item.num_cases, 'case')}")
    return max((item.exit_code for item in checked), default=ExitCode.NOTHING_RAN)
