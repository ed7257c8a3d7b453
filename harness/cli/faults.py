"""The command `harness faults`: what is planted to prove the checks, and whether they see it."""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from harness.campaign import campaign as made
from harness.campaign.campaign import Asked, CampaignView, Matrix, Row
from harness.campaign.cases import scenario_text
from harness.errors import NothingSelected, UsageError, did_you_mean, shown
from harness.faults.catalogue import CATALOGUE
from harness.faults.fault import Fault
from harness.masking import Masker
from harness.records import ExitCode, Verdict
from harness.runner.plan import Plan
from harness.scenario.suite import compile_expression
from harness.store.files import write_atomic
from harness.terminal import cell, duration, make_console, plain_table, plan_line

CLEAN_CASES = 200
MATRIX_FILES = ("matrix.md", "matrix.json")

_PATH = click.Path(path_type=Path)
_json = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON value on stdout; messages go to stderr."
)
_keyword = click.option(
    "-k", "keyword", metavar="EXPR",
    help="Only faults whose name, class, source or words match: 'streams and not F31'.",
)  # fmt: skip


@click.group("faults")
def faults_command() -> None:
    """Known faults that are planted to prove that the checks see them."""


@faults_command.command("list")
@_keyword
@_json
def list_faults(*, keyword: str | None, as_json: bool) -> int:
    """Every fault of the catalogue: what it is, where it shows, what must catch it."""
    chosen = _selected((), keyword)
    if as_json:
        click.echo(json.dumps([_plain(fault) for fault in chosen], allow_nan=False))
        return ExitCode.PASSED
    console = make_console()
    _print_table(console, made.CATALOGUE_HEADERS, map(made.entry_of, chosen))
    console.print(Text(f"{len(chosen)} of {len(CATALOGUE)} faults"))
    return ExitCode.PASSED


@faults_command.command("show")
@click.argument("name")
@_json
def show_fault(*, name: str, as_json: bool) -> int:
    """All of one entry, and a scenario that shows it, to copy."""
    (fault,) = _selected((name,), None)
    if as_json:
        plain = {**_plain(fault), "scenario": scenario_text(fault)}
        click.echo(json.dumps(plain, allow_nan=False))
        return ExitCode.PASSED
    plain = _plain(fault)
    words = {
        "fault": "name", "what": "description", "class": "kind", "source": "source",
        "symptom": "symptom", "caught as": "expects", "found in": "points_at",
        "devices": "devices", "takes": "takes", "scopes": "scopes", "layout": "layout",
    }  # fmt: skip
    # Comments of YAML: what is printed, written to a file, is the scenario.
    for key, name in words.items():
        value = plain[name]
        if isinstance(value, dict):
            value = [f"{inner} {shown(v)}" if name == "layout" else v for inner, v in value.items()]
        text = ", ".join(filter(None, value)) if isinstance(value, list) else value
        if text:
            click.echo(f"# {key:<10} {text}")
    click.echo(f"\n{scenario_text(fault)}", nl=False)
    return ExitCode.PASSED


@faults_command.command("run")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@_keyword
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where.")
@click.option(
    "--clean", type=click.IntRange(0), default=None, metavar="N",
    help=f"Clean cases next to them, {CLEAN_CASES} by default, or none for named faults.",
)  # fmt: skip
@click.option("--no-locate", is_flag=True, help="Do not ask where the fault is.")
@click.option("--out", type=_PATH, metavar="FOLDER", help="Run folder to make.")
@click.option("--resume", type=_PATH, metavar="RUN", help="Go on with a run folder.")
@click.option("--shard", metavar="I/N", help="Only the part that is shard I of N.")
@click.option("--slots", type=click.IntRange(1), help="Ranks that may run at a time.")
@click.option(
    "--ranks-per-gpu", type=click.IntRange(1), metavar="N", help="Ranks that share a GPU."
)
@click.option("--jobs", type=click.IntRange(1), help="Runs that may run at a time.")
@click.option(
    "--patience", type=click.FloatRange(min=1), metavar="X",
    help="Time limits are X times as long: for a machine that is slow or busy. 1, on GPUs 4.",
)  # fmt: skip
@_json
def run_faults(
    *, names: tuple[str, ...], keyword: str | None, clean: int | None, no_locate: bool,
    as_json: bool, **room: Any,
) -> int:  # fmt: skip
    """Plant faults, all by default, and print which check sees each, when, and where it points.

    Exit code 0 only if every fault that can run here was detected and no clean case failed.
    """
    resume = room["resume"]
    if resume is not None and (names or keyword or clean is not None or room["shard"]):
        raise UsageError(f"--resume: expected no names, -k, --clean or --shard with {resume}")
    some = bool(names or keyword)
    asked = Asked(
        faults=() if resume else _selected(names, keyword),
        clean=(0 if some else CLEAN_CASES) if clean is None else clean,
        locate=not no_locate,
        **room,
    )
    console = make_console(stderr=as_json)
    args: list[str] = click.get_current_context().find_root().obj or sys.argv[1:]

    def say(what: Row | Verdict | Plan, done: int, planned: int) -> None:
        line = Text(plan_line(what)) if isinstance(what, Plan) else _line(what)
        if line is not None:
            count = Text("" if isinstance(what, Plan) else f"[{done}/{planned}] ", style="dim")
            console.print(count + line, soft_wrap=True)

    argv = ["harness", *Masker(os.environ).words(args)]
    folder, matrix = made.carry_out_campaign(asked, CampaignView(say), argv=argv)
    texts = (made.markdown(matrix), json.dumps(matrix.to_json(), indent=1))
    for name, text in zip(MATRIX_FILES, texts, strict=True):
        write_atomic(folder / name, text)
    _print_table(console, made.HEADERS, map(made.fields_of, matrix.ran))
    files = f"in {duration(matrix.wall_s)}; {folder / MATRIX_FILES[0]}, .json"
    for line in (*made.summary_lines(matrix), files):
        console.print(Text(line), soft_wrap=True)
    code = exit_code(matrix)
    if as_json:
        plain = {"exit_code": int(code), "folder": str(folder), **matrix.to_json()}
        click.echo(json.dumps(plain, allow_nan=False))
    return code


@faults_command.command("table")
@click.argument("folders", type=_PATH, nargs=-1, metavar="[RUN]...")
@click.option(
    "--write", type=_PATH, metavar="FILE",
    help="Put it there; without a RUN, what was measured there stays.",
)  # fmt: skip
def table_of_faults(*, folders: tuple[Path, ...], write: Path | None) -> int:
    """The catalogue as a document, with what RUN folders of matrices, or of shards, measured."""
    kept = made.measured_in(write.read_text()) if not folders and write and write.exists() else ""
    text = made.document(made.merged([read_json(folder) for folder in folders])) + kept
    if write is None:
        click.echo(text, nl=False)
    else:
        write_atomic(write, text)
    return ExitCode.PASSED


def read_json(folder: Path) -> Matrix:
    """The matrix that `harness faults run` left in a folder.

    Raises:
        UsageError: there is none.
    """
    path = folder / MATRIX_FILES[1]
    try:
        plain = json.loads(path.read_text())
        plain.pop("rates", None)
        return Matrix.from_json(plain)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: expected the matrix of a finished run, got {error}") from None


def exit_code(matrix: Matrix) -> ExitCode:
    """0 only if something ran, all of it was detected and nothing else was said."""
    if not matrix.ran and not matrix.clean:
        return ExitCode.NOTHING_RAN
    if matrix.missed or any(alarm.outcome == "failed" for alarm in matrix.alarms):
        return ExitCode.FAILED
    return ExitCode.NO_VERDICT if matrix.alarms else ExitCode.PASSED


def _line(what: Row | Verdict) -> Text | None:
    """Of a row, or of a clean case that is not clean."""
    if isinstance(what, Verdict):
        if what.outcome in ("passed", "skipped"):
            return None
        message = f"{what.outcome} without a fault: {what.case_id}: {what.message}"
        return Text(message, style="bold red")
    colour = {"detected": "green", "not run": "yellow"}.get(what.status, "bold red")
    line = Text(f"{what.fault:<28} {made.seen_by(what)}", style=colour, overflow="fold")
    under = f" under {'+'.join(what.under)}" if what.under else ""
    step = made.fields_of(what)[made.HEADERS.index("step")]
    more = f": {what.reason}" if what.status != "detected" else ""
    if what.status == "detected" and what.localised in ("near", "no"):
        more = f": {made.places_of(what)}"
    return line.append(f"{under}, step {step or '-'}, place {what.localised or '-'}{more}", "none")


def _print_table(console: Console, headers: Iterable[str], rows: Iterable[tuple[str, ...]]) -> None:
    table = plain_table(*headers)
    for row in rows:
        table.add_row(*map(cell, row))
    console.print(table)


def _selected(names: Iterable[str], keyword: str | None) -> tuple[Fault, ...]:
    """Faults by name, or those that an expression fits, in the order of the catalogue.

    Raises:
        UsageError: no fault has that name.
        NothingSelected: the expression fits none.
    """
    wanted = tuple(names)
    for name in wanted:
        if name not in CATALOGUE:
            raise UsageError(
                f"expected the name of a fault, got {shown(name)}"
                f"{did_you_mean(name, CATALOGUE)}; harness faults list has all of them"
            )
    chosen = [CATALOGUE[name] for name in CATALOGUE if not wanted or name in wanted]
    if keyword is not None:
        fits = compile_expression(keyword)
        chosen = [fault for fault in chosen if fits(_known_as(fault))]
    if not chosen:
        raise NothingSelected(f"-k {shown(keyword)} selects none of {len(CATALOGUE)} faults")
    return tuple(chosen)


def _known_as(fault: Fault) -> str:
    words = (fault.name, fault.kind, fault.source, *fault.expects, *fault.devices,
             *fault.setup.graph, *fault.setup.stress)  # fmt: skip
    return "\n".join(words).lower()


def _plain(fault: Fault) -> dict[str, Any]:
    pointer, setup = fault.points_at, fault.setup
    return {
        "name": fault.name, "kind": fault.kind, "source": fault.source,
        "description": fault.description, "symptom": fault.symptom,
        "expects": list(fault.expects), "devices": list(fault.devices),
        "takes": list(fault.takes), "scopes": list(fault.scopes),
        "layout": dict(fault.needs), "counterpart": fault.counterpart,
        "everywhere": fault.everywhere,
        "graph": list(setup.graph), "stress": list(setup.stress),
        "points_at": {
            "phase": pointer.phase, "module": pointer.module, "tensor": pointer.tensor,
        },
    }  # fmt: skip
