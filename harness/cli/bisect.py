"""`harness bisect CASE`: from a failing case to where, and why, it fails."""

import dataclasses
import json
import os
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from harness import machine
from harness import terminal as display
from harness.bisect.layouts import case_of_two, is_one_layout
from harness.bisect.render import PAGE_FILE, Findings, make_search_view, print_findings
from harness.bisect.repro import FOLDER
from harness.bisect.session import Search, Until, bisect
from harness.errors import NothingSelected, UsageError
from harness.masking import Masker
from harness.records import CaseSpec, ExitCode, Verdict
from harness.scenario.matrix import expand
from harness.scenario.schema import Overrides, load_scenario
from harness.scenario.selection import select
from harness.store import RunFolder
from harness.store.find import find_answer

_PATH = click.Path(path_type=Path)
SCENARIO_SUFFIXES = (".yaml", ".yml")
MOST_NAMED = 5
UNTIL = typing.get_args(Until)
Command = Callable[..., Any]

_ROOM = (
    click.option("--slots", type=click.IntRange(1), help="Ranks that run at the same time."),
    click.option(
        "--ranks-per-gpu", type=click.IntRange(1), metavar="N", help="Let N ranks share a GPU."
    ),
    click.option("--jobs", type=click.IntRange(1), help="Runs at the same time at most."),
)


def _room(function: Command) -> Command:
    for option in reversed(_ROOM):
        function = option(function)
    return function


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cells:
    """Which cells of a scenario are meant: the options that go with one."""

    keyword: str | None
    against: str | None
    step: int | None
    device: str | None
    sets: tuple[str, ...]

    def refuse(self) -> None:
        """There is no scenario (`UsageError` if one of them was given)."""
        if any((self.keyword, self.against, self.device, self.sets)) or self.step is not None:
            raise UsageError(
                "bisect: expected -k, --against, --step, --device and --set with a scenario, got "
                "a case"
            )

    def chosen(self, path: Path) -> tuple[CaseSpec, range | None]:
        """The case, and the steps in which two layouts may be compared; None for one layout.

        Raises:
            UsageError: not one cell is meant, or the two have nothing to compare.
        """
        one = self._cell(path, self.keyword, "-k")
        if self.against is None:
            return one, None
        other = self._cell(path, self.against, "--against")
        case = case_of_two(one, other)
        if is_one_layout(one, other):
            return case, None
        if self.step is not None:
            return case, range(self.step, self.step + 1)
        return case, range(int(case.candidate.config["steps"]))

    def _cell(self, path: Path, keyword: str | None, option: str) -> CaseSpec:
        scenario = load_scenario(path, overrides=Overrides(self.sets, ()))
        wanted = self.device or "auto"
        device = machine.resolve_device(
            scenario.launch.device if wanted == "auto" else wanted, machine.describe()
        )
        cases = select(expand(scenario, device), keyword)
        if not cases:
            raise NothingSelected(f"no case is selected by {option}")
        if len(cases) > 1:
            named = ", ".join(case.id for case in cases[:MOST_NAMED])
            more = ", ..." if len(cases) > MOST_NAMED else ""
            raise UsageError(
                f"bisect {path}: expected {option} EXPR that selects one case, got {len(cases)}: "
                f"{named}{more}"
            )
        return cases[0]


@click.command("bisect")
@click.argument("case")
@click.argument("folder", type=_PATH, metavar="[RUN]", required=False)
@click.option(
    "-k", "keyword", metavar="EXPR", help="With a scenario: the one case to bisect, as in pytest."
)
@click.option(
    "--against",
    metavar="EXPR",
    help="With a scenario: compare with this case in place of the reference.",
)
@click.option(
    "--step", type=click.IntRange(0), metavar="N",
    help="With --against of another layout: the step to compare; by default the first one "
    "that differs.",
)  # fmt: skip
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), help="With a scenario: device."
)
@click.option(
    "--set", "sets", multiple=True, metavar="KEY=YAML", help="With a scenario: base value."
)
@click.option(
    "--out", type=_PATH, metavar="FOLDER", help="Folder of the search; it continues where it was."
)
@click.option(
    "--budget-runs",
    type=click.IntRange(0),
    metavar="N",
    help="Stop after N runs; call again to continue.",
)
@click.option(
    "--budget-minutes",
    type=click.FloatRange(0),
    metavar="M",
    help="Stop after M minutes; call again to continue.",
)
@click.option("--no-element", is_flag=True, help="Do not look for the first differing element.")
@click.option(
    "--until", type=click.Choice(UNTIL), default="least", show_default=True,
    help="Stop after this stage.",
)  # fmt: skip
@click.option(
    "--repro", type=_PATH, default=FOLDER, show_default=True, metavar="FOLDER",
    help="Folder for the minimal scenario that reproduces the failure.",
)  # fmt: skip
@click.option(
    "--passed",
    type=_PATH,
    metavar="RUN",
    help="Run folder in which the case passed: report what changed since.",
)
@click.option("--commits", default="", metavar="GOOD..BAD", help="Also find the first bad commit.")
@click.option(
    "--package",
    nargs=2,
    metavar="NAME A..B",
    help="With a program: also find the first bad release of a package.",
)
@click.option(
    "--every-run", is_flag=True,
    help="With --commits: the failure is deterministic, so one run a commit is enough.",
)  # fmt: skip
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON value on stdout; messages go to stderr."
)
@_room
def bisect_command(
    *, case: str, folder: Path | None, passed: Path | None, no_element: bool, as_json: bool,
    **options: Any,
) -> int:  # fmt: skip
    """Find where a failing case fails, and why: step, phase, module, tensor, rank, element.

    CASE is a case folder, an id in RUN (the newest under out/ by default), or a scenario file, of
    which -k selects one case; --against another one holds their candidates to each other, bit for
    bit or, of two layouts, within bounds of rounding. The search goes on where it was if its folder
    is there. Of recorded runs (harness compare-runs) the records alone are read.

    Exit codes: 0 the case passes, 1 it fails and the search is done, 2 interrupted, 6 it could not
    be judged, or the budget ended first.
    """
    if options["every_run"] and not options["commits"]:
        raise UsageError("--every-run: expected --commits GOOD..BAD beside it, got none")
    cells = _Cells(**{field.name: options.pop(field.name) for field in dataclasses.fields(_Cells)})
    place: Path | None = None
    layout_steps: range | None = None
    if case.endswith(SCENARIO_SUFFIXES):
        if folder is not None:
            raise UsageError(f"bisect: expected no RUN beside the scenario {case}, got {folder}")
        spec, layout_steps = cells.chosen(Path(case))
    else:
        cells.refuse()
        place, spec, verdict, _ = find_answer(case, folder)
        if verdict is not None and verdict.outcome in ("passed", "skipped"):
            return _nothing(verdict, as_json=as_json)
    _refuse(spec, options["commits"])
    if spec.reference.recorded:
        options["until"] = min(options["until"], "place", key=UNTIL.index)
    console = display.make_console(stderr=as_json)
    asked = Search(
        case=dataclasses.replace(spec, skip_reason=""), place=place, argv=_command_line(),
        element=not no_element, layout_steps=layout_steps,
        passed=None if passed is None else RunFolder.open(passed), **options,
    )  # fmt: skip
    findings, where = bisect(asked, make_search_view(console))
    code = _code(findings)
    if as_json:
        plain = findings.to_json() | {"folder": str(where), "exit_code": int(code)}
        click.echo(json.dumps(plain, allow_nan=False))
    else:
        print_findings(console, findings, where / PAGE_FILE)
    return code


def _refuse(spec: CaseSpec, commits: str) -> None:
    """See that there are bits to follow, and runs that can be made if commits ask for them."""
    if spec.expect != "bitwise":
        raise UsageError(
            f"bisect: expected a case that compares bits, {spec.id} is judged within a tolerance: "
            "its verdict has the place and the largest gap"
        )
    if spec.reference.recorded and commits:
        raise UsageError("--commits: expected a case that can be run, its runs were recorded")


def _nothing(verdict: Verdict, *, as_json: bool) -> int:
    """A case that passed has no cause to look for; one that was skipped no records."""
    told = f"{verdict.case_id} {verdict.outcome}: nothing to bisect ({verdict.message})"
    click.echo(json.dumps({"verdict": verdict.to_json()}, allow_nan=False) if as_json else told)
    return ExitCode.PASSED if verdict.outcome == "passed" else ExitCode.NOTHING_RAN


def _code(findings: Findings) -> ExitCode:
    if findings.outcome == "passed":
        return ExitCode.PASSED
    if findings.stopped or findings.outcome != "failed":
        return ExitCode.NO_VERDICT
    return ExitCode.FAILED


def _command_line() -> list[str]:
    args: list[str] = click.get_current_context().find_root().obj
    return ["harness", *Masker(os.environ).words(args)]
