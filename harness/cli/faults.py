"""The command `harness faults`: what is planted to prove the checks, and whether they see it."""

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from harness.campaign import pages
from harness.campaign.campaign import (
    Asked,
    CampaignView,
    Matrix,
    Row,
    carry_out_campaign,
    merged,
)
from harness.campaign.cases import scenario_text
from harness.errors import NothingSelected, UsageError, did_you_mean, shown
from harness.faults.catalogue import CATALOGUE
from harness.faults.fault import Fault
from harness.masking import Masker
from harness.records import ExitCode, RunOutcome, Verdict
from harness.runner.plan import Plan
from harness.scenario.selection import compile_expression
from harness.store.files import write_atomic
from harness.terminal import cell, duration, make_console, plain_table, plan_line

CLEAN_CASES = 200
CLEAN_PER_LINE = 50
MATRIX_FILES = ("matrix.md", "matrix.json", "matrix.html")

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
    _print_table(console, pages.CATALOGUE_HEADERS, map(pages.entry_of, chosen))
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
    pointer = fault.points_at
    place = filter(None, (f"phase {pointer.phase}", pointer.module, pointer.tensor))
    lines = {
        "fault": fault.name, "what": fault.description, "class": fault.kind,
        "source": fault.source, "symptom": fault.symptom, "caught as": ", ".join(fault.expects),
        "found in": ", ".join(place), "devices": ", ".join(fault.devices),
        "takes": ", ".join(fault.takes), "scopes": ", ".join(fault.scopes),
        "layout": ", ".join(f"{name} {shown(least)}" for name, least in fault.needs.items()),
    }  # fmt: skip
    # Comments of YAML: what is printed, written to a file, is the scenario.
    for key, value in lines.items():
        if value:
            click.echo(f"# {key:<10} {value}")
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
@click.option(
    "--elsewhere", type=click.IntRange(0), metavar="SEED",
    help="Each fault once, in a setup drawn with SEED, not in its own; no clean cases.",
)  # fmt: skip
@click.option("--out", type=_PATH, metavar="FOLDER", help="Run folder to make.")
@click.option("--resume", type=_PATH, metavar="RUN", help="Go on with a run folder.")
@click.option("--shard", metavar="I/N", help="Only the part that is shard I of N.")
@click.option("--slots", type=click.IntRange(1), help="Ranks that may run at a time.")
@click.option(
    "--ranks-per-gpu", type=click.IntRange(1), metavar="N", help="Let N ranks share a GPU."
)
@click.option("--jobs", type=click.IntRange(1), help="Runs that may run at a time.")
@click.option(
    "--patience",
    type=click.FloatRange(min=1),
    metavar="X",
    help="Time limits are X times as long: for a machine that is slow or busy. 1, on GPUs 4.",
)
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
    some = bool(names or keyword) or room["elsewhere"] is not None
    asked = Asked(
        faults=() if resume else _selected(names, keyword),
        clean=(0 if some else CLEAN_CASES) if clean is None else clean,
        locate=not no_locate,
        **room,
    )
    console = make_console(stderr=as_json)
    args: list[str] = click.get_current_context().find_root().obj or sys.argv[1:]
    folder, matrix = carry_out_campaign(
        asked, _Printer(console), argv=["harness", *Masker(os.environ).words(args)]
    )
    texts = (pages.markdown(matrix), json.dumps(matrix.to_json(), indent=1), pages.page(matrix))
    for name, text in zip(MATRIX_FILES, texts, strict=True):
        write_atomic(folder / name, text)
    _print_table(console, pages.HEADERS, map(pages.fields_of, matrix.ran))
    files = f"in {duration(matrix.wall_s)}; {folder / MATRIX_FILES[0]}, .json, .html"
    for line in (*pages.summary_lines(matrix), files):
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
    kept = pages.measured_in(write.read_text()) if not folders and write and write.exists() else ""
    text = pages.document(merged([read_json(folder) for folder in folders])) + kept
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


class _Printer(CampaignView):
    """A line for each row and each alarm, a count of the rest."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._num_runs = self._done = self._clean = 0

    def planned(self, plan: Plan) -> None:
        """Print the plan."""
        super().planned(plan)
        self._num_runs = len(plan.runs)
        self._console.print(Text(plan_line(plan)))

    def run_finished(self, outcome: RunOutcome) -> None:
        """Count it."""
        self._done += 1

    def row(self, row: Row) -> None:
        """Print it."""
        line = Text(overflow="fold")
        line.append(f"[{self._done}/{max(self._num_runs, self._done)}] ", style="dim")
        colour = {"detected": "green", "not run": "yellow"}.get(row.status, "bold red")
        line.append(f"{row.fault:<28} {pages.seen_by(row)}", style=colour)
        under = f" under {'+'.join(row.under)}" if row.under else ""
        line.append(f"{under}, step {pages.steps_of(row) or '-'}, place {row.localised or '-'}")
        if row.status != "detected":
            line.append(f": {row.reason}")
        elif row.localised in ("near", "no"):
            line.append(f": expected {pages.due_place(row)}; got {pages.found_place(row)}")
        self._console.print(line, soft_wrap=True)

    def clean(self, verdict: Verdict) -> None:
        """Print what is not clean."""
        self._clean += 1
        if self._clean % CLEAN_PER_LINE == 0:
            self._console.print(Text(f"[{self._done}] {self._clean} clean cases", style="dim"))
        if verdict.outcome not in ("passed", "skipped"):
            line = f"{verdict.outcome} without a fault: {verdict.case_id}: {verdict.message}"
            self._console.print(Text(line, style="bold red"), soft_wrap=True)


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
        fits: Callable[[str], bool] = compile_expression(keyword)
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
