"""The command `harness faults`: what is planted to prove the checks, and whether they see it."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

import click
from rich.text import Text

from harness import cli
from harness.campaign import campaign as made
from harness.campaign.campaign import Matrix, Row
from harness.campaign.cases import scenario_text
from harness.errors import NothingSelected, UsageError, did_you_mean, shown
from harness.faults.catalogue import CATALOGUE, Fault
from harness.records import ExitCode, Verdict
from harness.runner.plan import Plan
from harness.scenario.suite import compile_expression
from harness.store.files import write_atomic
from harness.terminal import duration, make_console, plan_line, print_line, print_table

CLEAN_CASES = 200
MATRIX_FILES = ("matrix.md", "matrix.json")

_keyword = click.option(
    "-k", "keyword", metavar="EXPR",
    help="Only faults whose name, class, source or words match: 'streams and not F31'.",
)  # fmt: skip


@click.group("faults")
def faults_command() -> None:
    """Known faults that are planted to prove that the checks see them."""


@faults_command.command("list")
@_keyword
@cli.as_json
def list_faults(*, keyword: str | None, as_json: bool) -> int:
    """Every fault of the catalogue: what it is, where it shows, what must catch it."""
    chosen = _selected((), keyword)
    if as_json:
        cli.print_json([_plain(fault) for fault in chosen])
    else:
        print_table(make_console(), made.CATALOGUE_HEADERS, map(made.entry_of, chosen))
        click.echo(f"{len(chosen)} of {len(CATALOGUE)} faults")
    return ExitCode.PASSED


@faults_command.command("show")
@click.argument("name")
@cli.as_json
def show_fault(*, name: str, as_json: bool) -> int:
    """All of one entry, and a scenario that shows it, to copy."""
    (fault,) = _selected((name,), None)
    plain = {**_plain(fault), "scenario": scenario_text(fault)}
    if as_json:
        cli.print_json(plain)
        return ExitCode.PASSED
    # Comments of YAML: what is printed, written to a file, is the scenario.
    for key in ("name", "description", "kind", "source", "symptom", "expects", "points_at",
                "devices", "takes", "scopes", "needs"):  # fmt: skip
        value = plain[key]
        if isinstance(value, dict):
            value = [f"{inner} {shown(v)}" for inner, v in value.items() if v]
        if text := ", ".join(value) if isinstance(value, list | tuple) else value:
            click.echo(f"# {key:<11} {text}")
    click.echo(f"\n{plain['scenario']}", nl=False)
    return ExitCode.PASSED


@faults_command.command("run")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@_keyword
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto",
              help="Device of every run.")  # fmt: skip
@click.option(
    "--clean", type=click.IntRange(0), default=None, metavar="N",
    help=f"Also run N cases without a fault, which must pass; {CLEAN_CASES} by default, none if "
    "faults are chosen.",
)  # fmt: skip
@click.option("--no-locate", is_flag=True, help="Do not look for the place of the fault.")
@click.option("--resume", type=cli.PATH, metavar="RUN", help="Continue an interrupted run folder.")
@cli.options(cli.out, cli.room)
@click.option(
    "--patience", type=click.FloatRange(min=1), metavar="X",
    help="Multiply time limits by X, on a machine that is slow or busy; by default 1, on GPUs 4.",
)  # fmt: skip
@cli.as_json
def run_faults(
    *, names: tuple[str, ...], keyword: str | None, clean: int | None, as_json: bool, **how: Any
) -> int:
    """Plant faults, all by default, and print which check sees each, when, and where it points.

    Exit codes: 0 every fault that can run here was detected and no clean case failed, 1 one was
    missed or a clean case failed, 5 nothing ran, 6 a clean case has no verdict.
    """
    resume = how["resume"]
    if resume is not None and (names or keyword or clean is not None):
        raise UsageError(f"--resume: expected no names, -k or --clean with {resume}")
    if clean is None:
        clean = 0 if names or keyword else CLEAN_CASES
    faults = () if resume else _selected(names, keyword)
    console = make_console(stderr=as_json)

    def say(what: Row | Verdict | Plan, done: int, planned: int) -> None:
        count = Text("" if isinstance(what, Plan) else f"[{done}/{planned}] ", style="dim")
        if (line := _line(what)) is not None:
            print_line(console, count + line)

    argv = cli.command_line()
    folder, matrix = made.carry_out_campaign(faults, clean, say, argv=argv, **how)
    page, file = (folder / name for name in MATRIX_FILES)
    write_atomic(page, made.markdown(matrix))
    write_atomic(file, json.dumps(matrix.to_json(), indent=1))
    print_table(console, made.HEADERS, map(made.fields_of, matrix.ran))
    for text in (*made.summary_lines(matrix), f"in {duration(matrix.wall_s)}; {page}, .json"):
        print_line(console, text)
    code = exit_code(matrix)
    if as_json:
        cli.print_json({"exit_code": int(code), "folder": str(folder), **matrix.to_json()})
    return code


def exit_code(matrix: Matrix) -> ExitCode:
    """0 only if something ran, all of it was detected and nothing else was said."""
    if not matrix.ran and not matrix.clean:
        return ExitCode.NOTHING_RAN
    if matrix.missed or any(alarm.outcome == "failed" for alarm in matrix.alarms):
        return ExitCode.FAILED
    return ExitCode.NO_VERDICT if matrix.alarms else ExitCode.PASSED


def _line(what: Row | Verdict | Plan) -> Text | None:
    if isinstance(what, Plan):
        return Text(plan_line(what))
    if isinstance(what, Verdict):
        message = f"{what.outcome} without a fault: {what.case_id}: {what.message}"
        is_clean = what.outcome in ("passed", "skipped")
        return None if is_clean else Text(message, style="bold red")
    colour = {"detected": "green", "not run": "yellow"}.get(what.status, "bold red")
    line = Text(f"{what.fault:<28} {made.seen_by(what)}", style=colour, overflow="fold")
    under = f" under {'+'.join(what.under)}" if what.under else ""
    step = made.fields_of(what)[made.HEADERS.index("step")]
    more = f": {what.reason}" if what.reason else ""
    if what.localised in ("near", "no"):
        more = f": {made.places_of(what)}"
    return line.append(f"{under}, step {step or '-'}, place {what.localised or '-'}{more}", "none")


def _selected(names: Iterable[str], keyword: str | None) -> tuple[Fault, ...]:
    """Faults by name, or those that an expression fits, in the order of the catalogue."""
    wanted = tuple(names)
    for name in wanted:
        if name not in CATALOGUE:
            raise UsageError(
                f"expected the name of a fault, got {shown(name)}"
                f"{did_you_mean(name, CATALOGUE)}; harness faults list has all of them"
            )
    fits = compile_expression(keyword) if keyword is not None else lambda known: True
    chosen = (fault for name, fault in CATALOGUE.items() if not wanted or name in wanted)
    found = tuple(fault for fault in chosen if fits(_known_as(fault)))
    if not found:
        raise NothingSelected(f"-k {shown(keyword)} selects none of {len(CATALOGUE)} faults")
    return found


def _known_as(fault: Fault) -> str:
    words = (fault.name, fault.kind, fault.source, *fault.expects, *fault.devices,
             *fault.setup.graph, *fault.setup.stress)  # fmt: skip
    return "\n".join(words).lower()


def _plain(fault: Fault) -> dict[str, Any]:
    plain = dataclasses.asdict(fault)
    setup = plain.pop("setup")
    return {**plain, "everywhere": fault.everywhere, "graph": setup["graph"],
            "stress": setup["stress"]}  # fmt: skip
