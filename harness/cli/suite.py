"""`harness list`: scenarios, their cases, their shards; and whether every case is legal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from harness.checks import table
from harness.checks.evidence import count as counted
from harness.cli import options
from harness.cli.options import PATH, print_json
from harness.errors import NothingSelected, UsageError
from harness.records import CaseSpec, ExitCode
from harness.scenario.matrix import count as number_of_cases
from harness.scenario.matrix import expand
from harness.scenario.schema import Overrides, load_scenario
from harness.scenario.suite import check_files, find_scenarios, load_suite, select

Listed = dict[str, tuple[int, Sequence[CaseSpec]]]
"""By scenario: the number of its cases, and the cases."""


def _print_checks(context: click.Context, _: click.Parameter, wanted: Any) -> None:
    if wanted:
        click.echo("\n".join(table()))
        context.exit(ExitCode.PASSED)


@click.command("list")
@click.argument("paths", type=PATH, nargs=-1)
@options.options(options.keyword, options.as_json, options.overrides, options.suite)
@click.option(
    "--shards", type=click.IntRange(1, 1000), metavar="N",
    help="Print what each of N shards would run; with --json, a job matrix for CI.",
)  # fmt: skip
@click.option("--checks", is_flag=True, is_eager=True, expose_value=False, callback=_print_checks,
              help="Print the checks that a scenario may ask for, and their options.")  # fmt: skip
@click.option(
    "--check", is_flag=True, help="Validate every case of every file and print every error."
)
@click.option("--count", is_flag=True, help="Print the number of cases only.")
def list_command(
    *, paths: tuple[Path, ...], keyword: str | None, as_json: bool, check: bool, count: bool,
    sets: tuple[str, ...], axes: tuple[str, ...], shards: int | None, **chosen_by: Any,
) -> int:  # fmt: skip
    """List the cases of a scenario; of several, how many each has.

    PATHS are files and folders, scenarios/ by default; FILE::NAME is one of a file's scenarios.
    With -k, --json, --tier, --select or --shard the cases of several are listed, too; the last
    three are those of `harness run`. Counts alone do not check that each case is legal: --check
    does.
    """
    overrides, paths = Overrides(sets, axes), paths or (Path("scenarios"),)
    tiers, how, shard = (chosen_by[name] for name in ("tiers", "select", "shard"))
    if shards is not None and shard is not None:
        raise UsageError(f"list --shards {shards}: expected no --shard {shard} with it")
    if check:
        return _check(find_scenarios(paths), overrides, as_json=as_json)
    if shards is None and not (tiers or how or shard):
        files = find_scenarios(paths)
        if not keyword and (count or (len(files) > 1 and not as_json)):
            scenarios = {str(file): load_scenario(file, overrides=overrides) for file in files}
            found: Listed = {name: (number_of_cases(s), ()) for name, s in scenarios.items()}
            return _show(found, (), as_json=as_json, count=True)
        found = _by_file(files, overrides, keyword, count=count)
        return _show(found, (), as_json=as_json, count=count)
    from harness.runner.plan import parts, take_shard

    suite = load_suite(paths, tiers=tiers, overrides=overrides)
    cases, selected = suite.cases("cpu", forced=True, keyword=keyword, how=how)
    if shards is not None:
        return _show_shards(parts(cases, shards), as_json=as_json)
    if shard is not None:
        cases, _ = take_shard(cases, shard)
    notes = [note for part in selected if (note := part.note())]
    return _show({suite.name: (len(cases), cases)}, notes, as_json=as_json, count=count)


def _by_file(
    files: Sequence[Path], overrides: Overrides, keyword: str | None, *, count: bool
) -> Listed:
    found: Listed = {}
    for file in files:
        if chosen := select(expand(load_scenario(file, overrides=overrides), "cpu"), keyword):
            # Ten thousands of a file take memory.
            found[str(file)] = len(chosen), () if count else chosen
    if not found:
        raise NothingSelected("no case is selected")
    return found


def _show(found: Listed, notes: Sequence[str], *, as_json: bool, count: bool) -> int:
    if as_json:
        print_json({name: number if count else [case.to_json() for case in cases]
                    for name, (number, cases) in found.items()})  # fmt: skip
        return ExitCode.PASSED
    for name, (number, cases) in found.items():
        click.echo(f"{name}: {counted(number, 'case')}")
        click.echo("".join(f"  {case.id}\n" for case in cases if not count), nl=False)
    if len(found) > 1:
        total = sum(number for number, _ in found.values())
        click.echo(f"{counted(total, 'case')} in {len(found)} scenarios")
    click.echo("".join(f"{note}\n" for note in notes), nl=False)
    return ExitCode.PASSED


def _show_shards(found: Sequence[dict[str, Any]], *, as_json: bool) -> int:
    """A line a shard that holds cases; as JSON, `{"include": [...]}` as GitHub takes it."""
    if as_json:
        print_json({"include": found})
        return ExitCode.PASSED
    for part in found:
        click.echo(
            f"--shard {part['shard']}: {counted(part['cases'], 'case')}, "
            f"{counted(part['runs'], 'run')}, about {part['expected_slot_s']:.0f} s of one slot"
        )
    return ExitCode.PASSED


def _check(files: Sequence[Path], overrides: Overrides, *, as_json: bool) -> int:
    checked = check_files(files, overrides)
    if as_json:
        print_json([item.to_json() for item in checked])
    for item in checked:
        if item.error:
            click.echo(item.error, err=True)
        elif not as_json:
            click.echo(f"{item.file}: {counted(item.num_cases, 'case')}")
    return max((item.exit_code for item in checked), default=ExitCode.NOTHING_RAN)
