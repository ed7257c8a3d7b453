"""`harness compare-runs`: judge two runs that were recorded already, as `harness run` would."""

from pathlib import Path

import click

from harness.checks import exit_code, judge
from harness.checks.taps import NAME as TAPS
from harness.cli import options
from harness.cli.options import PATH
from harness.cli.run import as_text, report_again
from harness.engine import base
from harness.errors import UsageError
from harness.program.spec import POSITIONAL, program_of
from harness.records import CaseSpec, RunResult, dumps
from harness.runner import recorded
from harness.runner.launch import create_folder, provenance_of
from harness.scenario.schema import decode_expect
from harness.scenario.yaml_source import Origin, parse_text
from harness.store import LEGS, SPEC_FILE, RunFolder, save_outcome
from harness.store.files import link_or_copy, make_folder, write_atomic
from harness.terminal import make_console, print_line, print_outcome
from harness.values import ROUNDING

SCENARIO, CASE = "compare-runs", "candidate"


@click.command("compare-runs")
@click.argument("reference", type=PATH)
@click.argument("candidate", type=PATH)
@click.option(
    "--control", type=PATH, metavar="RUN",
    help="A second recording of the reference, to tell nondeterminism from a defect.",
)  # fmt: skip
@options.out
@click.option(
    "--expect", default="bitwise", metavar="YAML", show_default=True,
    help="bitwise, or a tolerance as compare.expect of a scenario: '{rtol: 1e-5}'.",
)  # fmt: skip
@options.as_json
def compare_runs_command(
    *, reference: Path, candidate: Path, control: Path | None, out: Path | None, expect: str,
    as_json: bool,
) -> int:  # fmt: skip
    """Judge a recorded CANDIDATE against a recorded REFERENCE.

    Both are folders of harness wrap, or of a run in a run folder, RUN/runs/KEY. Without --control
    equal runs pass, and a difference is no verdict: the reference may not repeat itself.
    Exit codes as those of harness run.
    """
    stated = decode_expect(parse_text(expect, Origin("--expect")), "expect")
    if stated == ROUNDING:
        raise UsageError("--expect: expected bitwise or {rtol: R}, got rounding, for which harness "
                         "run makes more runs of the reference")  # fmt: skip
    for name, given in (("CANDIDATE", candidate), ("--control", control)):
        if given is not None and given.resolve() == reference.resolve():
            raise UsageError(f"compare-runs: expected another run as {name} than {reference}")
    places = {"reference": reference, "control": control or reference, "candidate": candidate}
    runs = _runs(places)
    taps = all(any(r.start and r.start.taps for r in run.ranks) for run in runs.values())
    case = CaseSpec(
        id=CASE, scenario=SCENARIO, expect=stated,
        checks={name: {} for name in ("loss", "state", "finite", *[TAPS] * taps)},
        labels={role: _words(runs[role], place) for role, place in places.items()},
        reference=runs["reference"].spec, control=runs["control"].spec,
        candidate=runs["candidate"].spec,
    )  # fmt: skip
    with _make_folder(out, case, places, runs) as folder:
        folder.seal_case(case)
        verdict = judge(case, *(folder.load_run(runs[role].spec) for role in LEGS))
        folder.save_verdict(verdict, case)
    code, console = exit_code([verdict]), make_console(stderr=as_json)
    print_outcome(console, [verdict], 1)
    print_line(console, f"; run folder {folder.path}")
    reports = report_again(console, folder.path)
    if as_json:
        options.print_json({
            "exit_code": int(code), "folder": str(folder.path), "verdict": verdict.to_json(),
            "reports": as_text(reports),
        })  # fmt: skip
    return code


def _runs(places: dict[str, Path]) -> dict[str, RunResult]:
    """The runs by role, with keys that differ and the steps that are due.

    Runs that state no steps are held to those of another, or that rank 0 of the reference recorded.
    """
    runs = {role: recorded.load(place) for role, place in places.items()}
    stated = (run.spec.config["steps"] for run in runs.values() if "steps" in run.spec.config)
    steps = next(stated, recorded.steps_on_rank_0(runs["reference"]))
    numbers = {"reference": 0, "control": int(places["control"] != places["reference"])}
    return {
        role: recorded.renamed(recorded.with_steps(run, steps), replica=numbers.get(role, 2))
        for role, run in runs.items()
    }


def _words(run: RunResult, place: Path) -> str:
    """What a run is called: its command, or where it lies."""
    program = program_of(run.spec.config)
    if program is None or program.kind != "command":
        return str(place)
    return " ".join([program.target, *map(str, program.args.get(POSITIONAL, ()))])


def _make_folder(
    out: Path | None, case: CaseSpec, places: dict[str, Path], runs: dict[str, RunResult]
) -> RunFolder:
    """A run folder with copies of the runs under their keys."""
    why = f"{places['candidate']} against {places['reference']}, both recorded before."
    said = {
        "scenario": SCENARIO, "why": why, "device": case.candidate.device,
        **provenance_of(base.describe_machine(), []),
        "runs": {role: str(place.absolute()) for role, place in places.items()},
    }  # fmt: skip

    def fill(folder: RunFolder) -> None:
        for role, run in runs.items():
            target = folder.run_folder(run.spec.key)
            if target.exists():
                continue  # the reference, which is its own control
            make_folder(target)
            for path in places[role].glob("rank*"):
                if path.is_file():
                    link_or_copy(str(path), str(target / path.name))
            write_atomic(target / SPEC_FILE, dumps(run.spec) + "\n")
            save_outcome(target, run.outcome)

    return create_folder(out, SCENARIO, [case], said, fill, argv=options.command_line())
