"""`harness bisect CASE`: from a failing case to where, and why, it fails."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import click

from harness import machine
from harness import terminal as display
from harness.bisect.layouts import case_of_two, is_one_layout
from harness.bisect.render import PAGE_FILE, Findings, make_search_view, print_findings
from harness.bisect.repro import FOLDER
from harness.bisect.session import STAGES, Search, bisect
from harness.errors import NothingSelected, UsageError
from harness.masking import Masker
from harness.records import CaseSpec, ExitCode, Verdict
from harness.scenario.matrix import expand
from harness.scenario.schema import Overrides, load_scenario
from harness.scenario.suite import select
from harness.store import RunFolder
from harness.store.verify import find_answer

_PATH = click.Path(path_type=Path)
MOST_NAMED = 5


def _chosen(
    path: Path, *, keyword: str | None, against: str | None, device: str | None,
    sets: tuple[str, ...],
) -> tuple[CaseSpec, bool]:  # fmt: skip
    """The case of a scenario that is meant, and whether it is of two layouts.

    Raises:
        UsageError: not one case is meant, or the two have nothing to compare.
    """

    def one_of(expression: str | None, option: str) -> CaseSpec:
        scenario = load_scenario(path, overrides=Overrides(sets, ()))
        wanted = scenario.launch.device if device in (None, "auto") else device
        resolved = machine.resolve_device(wanted, machine.describe())
        cases = select(expand(scenario, resolved), expression)
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

    one = one_of(keyword, "-k")
    if against is None:
        return one, False
    other = one_of(against, "--against")
    return case_of_two(one, other), not is_one_layout(one, other)


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
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), help="With a scenario: device."
)
@click.option(
    "--set", "sets", multiple=True, metavar="KEY=YAML", help="With a scenario: base value."
)
@click.option(
    "--out", type=_PATH, metavar="FOLDER", help="Folder of the search; it continues where it was."
)
@click.option(
    "--budget-runs", type=click.IntRange(0), metavar="N",
    help="Stop after N runs; call again to continue.",
)  # fmt: skip
@click.option(
    "--budget-minutes", type=click.FloatRange(0), metavar="M",
    help="Stop after M minutes; call again to continue.",
)  # fmt: skip
@click.option("--no-element", is_flag=True, help="Do not look for the first differing element.")
@click.option(
    "--until", type=click.Choice(STAGES), default="least", show_default=True,
    help="Stop after this stage.",
)  # fmt: skip
@click.option(
    "--repro", type=_PATH, default=FOLDER, show_default=True, metavar="FOLDER",
    help="Folder for the minimal scenario that reproduces the failure.",
)  # fmt: skip
@click.option(
    "--passed", type=_PATH, metavar="RUN",
    help="Run folder in which the case passed: report what changed since.",
)  # fmt: skip
@click.option("--commits", default="", metavar="GOOD..BAD", help="Also find the first bad commit.")
@click.option(
    "--package", nargs=2, metavar="NAME A..B",
    help="With a program: also find the first bad release of a package.",
)  # fmt: skip
@click.option(
    "--every-run", is_flag=True,
    help="With --commits or --package: the failure is deterministic, so run each only once.",
)  # fmt: skip
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON value on stdout; messages go to stderr."
)
@click.option("--slots", type=click.IntRange(1), help="Ranks that run at the same time.")
@click.option(
    "--ranks-per-gpu", type=click.IntRange(1), metavar="N", help="Let N ranks share a GPU."
)
@click.option("--jobs", type=click.IntRange(1), help="Runs at the same time at most.")
def bisect_command(
    *, case: str, folder: Path | None, passed: Path | None, no_element: bool, as_json: bool,
    **options: Any,
) -> int:  # fmt: skip
    """Find where a failing case fails, and why: step, phase, module, tensor, rank, element.

    CASE is a case folder, an id in RUN (the newest under out/ by default), or a scenario file, of
    which -k selects one case; --against another one compares their candidates with each other, bit
    for bit or, of two layouts, within bounds of rounding. The search goes on where it was if its
    folder is there. Of recorded runs (harness compare-runs) the records alone are read.

    Exit codes: 0 the case passes, 1 it fails and the search is done, 2 interrupted, 6 it could not
    be judged, or the budget ended first.
    """
    if options["every_run"] and not (options["commits"] or options["package"]):
        raise UsageError("--every-run: expected --commits or --package with it, got none")
    meant = {name: options.pop(name) for name in ("keyword", "against", "device", "sets")}
    place: Path | None = None
    two_layouts = False
    if case.endswith((".yaml", ".yml")):
        if folder is not None:
            raise UsageError(f"bisect: expected no RUN beside the scenario {case}, got {folder}")
        spec, two_layouts = _chosen(Path(case), **meant)
    elif any(meant.values()):
        raise UsageError(
            "bisect: expected -k, --against, --device and --set with a scenario, got a case"
        )
    else:
        place, spec, verdict, _ = find_answer(case, folder)
        if verdict is not None and verdict.outcome in ("passed", "skipped"):
            return _nothing(verdict, as_json=as_json)
    if spec.expect != "bitwise":
        raise UsageError(
            f"bisect: expected a case that compares bits, {spec.id} is judged within a tolerance: "
            "its verdict has the place and the largest gap"
        )
    console = display.make_console(stderr=as_json)
    args: list[str] = click.get_current_context().find_root().obj
    asked = Search(
        case=dataclasses.replace(spec, skip_reason=""), place=place,
        argv=["harness", *Masker(os.environ).words(args)], element=not no_element,
        two_layouts=two_layouts, passed=None if passed is None else RunFolder.open(passed),
        **options,
    )  # fmt: skip
    findings, where = bisect(asked, make_search_view(console))
    code = _code(findings)
    if as_json:
        plain = findings.to_json() | {"folder": str(where), "exit_code": int(code)}
        click.echo(json.dumps(plain, allow_nan=False))
    else:
        print_findings(console, findings, where / PAGE_FILE)
    return code


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
