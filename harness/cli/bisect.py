"""`harness bisect CASE`: from a failing case to where, and why, it fails."""

import dataclasses
from pathlib import Path
from typing import Any

import click

from harness import cli
from harness.bisect.layouts import case_of_two, is_one_layout
from harness.bisect.render import PAGE_FILE, Findings, make_search_view, print_findings
from harness.bisect.repro import FOLDER
from harness.bisect.session import STAGES, Search, bisect
from harness.cli import PATH, print_json
from harness.engine import machine
from harness.errors import NothingSelected, UsageError
from harness.records import CaseSpec, ExitCode
from harness.scenario.matrix import expand
from harness.scenario.schema import Overrides, load_scenario
from harness.scenario.suite import SUFFIXES, select
from harness.store.folder import find_answer
from harness.terminal import make_console

MOST_NAMED = 5


@click.command("bisect")
@click.argument("case")
@click.argument("folder", type=PATH, metavar="[RUN]", required=False)
@cli.options(cli.keyword, cli.device, cli.sets, cli.room)
@click.option("--out", type=PATH, metavar="FOLDER",
              help="Folder of the search, with which the same command goes on; by default one "
              "under out/ that is named after the case.")  # fmt: skip
@click.option(
    "--against", metavar="EXPR",
    help="With a scenario: compare with this case in place of the reference.",
)  # fmt: skip
@click.option(
    "--no-element", is_flag=True, help="Do not look for the first differing operator and element."
)
@click.option("--until", type=click.Choice(STAGES), default="least", show_default=True,
              help="Stop after this stage.")  # fmt: skip
@click.option("--repro", type=PATH, default=FOLDER, show_default=True, metavar="FOLDER",
              help="Folder for the minimal scenario that reproduces the failure.")  # fmt: skip
@click.option("--commits", default="", metavar="A..B",
              help="Also find the first commit that fails, or that passes again.")  # fmt: skip
@click.option("--package", nargs=2, metavar="NAME A..B",
              help="With a program: also find the first release of a package that fails, or "
              "passes again.")  # fmt: skip
@click.option(
    "--every-run", is_flag=True,
    help="With --commits or --package: the failure is deterministic, so run each only once.",
)  # fmt: skip
@click.option("--hardware", is_flag=True,
              help="Is it the hardware? Run the guilty steps on other GPUs, or CPU cores, and in "
              "another order of ranks: the failure follows the device, the rank, the program, or "
              "does not repeat.")  # fmt: skip
@cli.as_json
def bisect_command(
    *, case: str, folder: Path | None, no_element: bool, as_json: bool, against: str | None,
    **how: Any,
) -> int:  # fmt: skip
    """Find where a failing case fails, and why: step, phase, module, tensor, rank, element.

    CASE is a case folder, an id in RUN (the newest under out/ by default), or a scenario file, of
    which -k selects one case; --against another one compares their candidates with each other, bit
    for bit or, of two layouts, within bounds of rounding. -k, --against, --device and --set go with
    a scenario. Interrupted, the same command goes on (timeout -s INT 30m harness bisect ...). Of
    recorded runs (harness compare-runs) the records alone are read.

    Exit codes: 0 the case passes, 1 it fails and the search is done, 2 interrupted, 6 it could not
    be judged.
    """
    if how["every_run"] and not (how["commits"] or how["package"]):
        raise UsageError("--every-run: expected --commits or --package with it, got none")
    meant = [how.pop(name) for name in ("keyword", "device", "sets")]
    room = {name: how.pop(name) for name in ("slots", "ranks_per_gpu", "jobs")}
    place, two_layouts = None, False
    if case.partition("::")[0].endswith(SUFFIXES):
        if folder is not None:
            raise UsageError(f"bisect: expected no RUN with the scenario {case}, got {folder}")
        spec = _one_of(Path(case), "-k", *meant)
        if against is not None:
            other = _one_of(Path(case), "--against", against, *meant[1:])
            two_layouts = not is_one_layout(spec, other)
            spec = case_of_two(spec, other)
    elif against or any(meant):
        raise UsageError(
            "bisect: expected -k, --against, --device and --set with a scenario, got a case"
        )
    else:
        place, spec, verdict, _ = find_answer(case, folder)
        if verdict is not None and verdict.outcome in ("passed", "skipped"):
            # A case that passed has no cause to look for; one that was skipped no records.
            if as_json:
                print_json({"verdict": verdict.to_json()})
            else:
                click.echo(f"{spec.id} {verdict.outcome}: nothing to bisect ({verdict.message})")
            return ExitCode.PASSED if verdict.outcome == "passed" else ExitCode.NOTHING_RAN
    if spec.expect != "bitwise" and not (how["commits"] or how["package"]):
        raise UsageError(
            f"bisect: expected a case that compares bits, or --commits or --package, {spec.id} is "
            "judged within a tolerance: its verdict has the place and the largest gap"
        )
    asked = Search(
        case=dataclasses.replace(spec, skip_reason=""), place=place, argv=cli.command_line(),
        element=not no_element, two_layouts=two_layouts, room=room, **how,
    )  # fmt: skip
    console = make_console(stderr=as_json)
    findings, where = bisect(asked, make_search_view(console))
    code = _code(findings)
    if as_json:
        print_json(findings.to_json() | {"folder": str(where), "exit_code": int(code)})
    else:
        print_findings(console, findings, where / PAGE_FILE)
    return code


def _one_of(
    path: Path, option: str, expression: str | None, device: str | None, sets: tuple[str, ...]
) -> CaseSpec:
    scenario = load_scenario(path, overrides=Overrides(sets, ()))
    wanted = scenario.launch.device if device in (None, "auto") else device
    cases = select(
        expand(scenario, machine.resolve_device(wanted, machine.describe_machine())), expression
    )
    if not cases:
        raise NothingSelected(f"no case is selected by {option}")
    if len(cases) > 1:
        more = ["..."] * (len(cases) > MOST_NAMED)
        named = ", ".join([*(case.id for case in cases[:MOST_NAMED]), *more])
        raise UsageError(f"bisect {path}: expected {option} EXPR that selects one case, got "
                         f"{len(cases)}: {named}")  # fmt: skip
    return cases[0]


def _code(findings: Findings) -> ExitCode:
    if findings.outcome == "passed":
        return ExitCode.PASSED
    is_open = findings.stopped or findings.outcome != "failed"
    return ExitCode.NO_VERDICT if is_open else ExitCode.FAILED
