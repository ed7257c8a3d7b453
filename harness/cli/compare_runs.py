"""Two recordings: `harness compare-runs` judges them, `harness diff` lays them side by side."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from harness import cli
from harness.checks import exit_code, judge
from harness.checks.evidence import count, show_ranks
from harness.checks.taps import NAME as TAPS
from harness.cli import PATH
from harness.cli.run import as_text, report_again
from harness.engine import machine
from harness.errors import UsageError
from harness.program.spec import POSITIONAL, program_of
from harness.records import CaseSpec, ExitCode, RunResult, dumps
from harness.runner import recorded
from harness.runner.launch import create_folder, provenance_of
from harness.runner.recorded import Comparison, Finding, Kind, compare
from harness.scenario.schema import decode_expect
from harness.scenario.yaml_source import Origin, parse_text
from harness.store import LEGS, SPEC_FILE, RunFolder, save_outcome
from harness.store.files import link_or_copy, make_folder, write_atomic
from harness.terminal import cell, make_console, print_line, print_outcome, print_table
from harness.values import ROUNDING

SCENARIO, CASE = "compare-runs", "candidate"


@click.command("compare-runs")
@click.argument("reference", type=PATH)
@click.argument("candidate", type=PATH)
@click.option(
    "--control", type=PATH, metavar="RUN",
    help="A second recording of the reference, to tell nondeterminism from a defect.",
)  # fmt: skip
@cli.out
@click.option(
    "--expect", default="bitwise", metavar="YAML", show_default=True,
    help="bitwise, or a tolerance as compare.expect of a scenario: '{rtol: 1e-5}'.",
)  # fmt: skip
@cli.as_json
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
    reports, code = report_again(console, folder.path, code)
    if as_json:
        cli.print_json({
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
    program = program_of(run.spec.config)
    if program is None or program.kind != "command":
        return str(place)
    return " ".join([program.target, *map(str, program.args.get(POSITIONAL, ()))])


def _make_folder(
    out: Path | None, case: CaseSpec, places: dict[str, Path], runs: dict[str, RunResult]
) -> RunFolder:
    why = f"{places['candidate']} against {places['reference']}, both recorded before."
    said = {
        "scenario": SCENARIO, "why": why, "device": case.candidate.device,
        **provenance_of(machine.describe_machine(), []),
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

    return create_folder(out, SCENARIO, [case], said, fill, argv=cli.command_line())


MOST_SHOWN = 40
NAMES: dict[Kind, str] = {
    "before": "state before the first step", "state": "state", "modules": "modules (taps)",
    "losses": "losses", "grad_norm": "gradient norm", "skipped": "skipped steps",
    "other": "other values",
}  # fmt: skip
CODES = "Exit codes: 0 all that both have is equal, 1 something differs, 4 usage, 5 nothing was " \
    "compared, 6 records are damaged or tensors have other shapes."  # fmt: skip


@click.command("diff", epilog=CODES)
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@cli.as_json
def diff_command(*, a: Path, b: Path, as_json: bool) -> int:
    """Compare two recordings: environments first, then the first difference in what both have.

    A and B are folders of jobs that recorded themselves, record(folder=...), of harness wrap, or of
    a run in a run folder, RUN/runs/KEY. They may be of other lengths, ranks or intervals.
    """
    done = compare(a, b)
    if as_json:
        cli.print_json(done.to_json() | {"exit_code": int(done.exit_code)})
    else:
        print_diff(make_console(), done)
    return done.exit_code


def print_diff(console: Console, done: Comparison) -> None:
    """Both sides, their environments, what differs, what was compared, and the answer."""
    sides = {"A": done.a, "B": done.b}
    for name, side in sides.items():
        console.print(cell(f"{name}  {side['path']}: {_side_words(side)}", "bold"))
    if not done.environment:
        console.print(cell("environment: the same"))
    facts = [(each.difference, each) for each in done.environment[:MOST_SHOWN]]
    print_table(console, ("environment", "A, or before", "B, or after", "on", "within"), [
        (at.quantity, at.reference, at.candidate, show_ranks(set(each.ranks)), each.within)
        for at, each in facts
    ])  # fmt: skip
    print_table(console, ("first difference of", "step", "rank", "in", "A", "B", "in all"),
                map(_row, done.findings))  # fmt: skip
    lines = [(words, "yellow") for words in done.notes]
    lines += [(f"damaged: {words}", "magenta") for words in done.problems]
    for words, colour in lines[:MOST_SHOWN]:
        console.print(cell(words, colour))
    shown = len(done.environment) - len(facts), len(lines[MOST_SHOWN:])
    if hidden := sum(shown):
        console.print(cell(f"{count(hidden, 'line')} not shown: --json", "dim"))
    for kind, gap in done.largest_gap.items():
        console.print(cell(f"largest relative gap of {kind}: {gap:.3g}"))
    counts = {f"only in {name}": side["only"] for name, side in sides.items()}
    for name, held in {**counts, "compared": done.compared}.items():
        if held:
            console.print(cell(f"{name}: {', '.join(count(n, noun) for noun, n in held.items())}"))
    print_line(console, *_answer(done))


def _side_words(side: Mapping[str, Any]) -> str:
    steps = f"{count(side['steps'], 'step')} ({side['first_step']} to {side['last_step']}), "
    return (f"{show_ranks(set(side['ranks']))} of {side['world_size']}; {steps}"
            f"{side['steps_with_digests']} with digests; {count(side['parts'], 'part')}; "
            f"{side['ended_ranks']} of {count(len(side['ranks']), 'rank')} ended")  # fmt: skip


def _place(found: Finding) -> str:
    at = found.difference
    return f"{at.tensor} ({at.quantity})" if at.tensor else at.quantity


def _row(found: Finding) -> tuple[object, ...]:
    at = found.difference
    sides = ("", "") if at.tensor else (at.reference, at.candidate)
    name = f"{NAMES[found.kind]}{f' within {found.within}' if found.within else ''}"
    in_all = f"{found.places} in this step; {found.records} of steps x ranks"
    return (cell(name, "red"), at.step, at.rank, _place(found), *sides, in_all)


def _answer(done: Comparison) -> tuple[str, str]:
    """The last line, and its colour."""
    if done.findings:
        found = min(done.findings, key=lambda each: (bool(each.within), each.difference.step))
        at = f"step {found.difference.step}, rank {found.difference.rank}"
        return f"differs: first at {at}, {NAMES[found.kind]}: {_place(found)}", "bold red"
    if done.exit_code == ExitCode.NO_VERDICT:
        counts = {"damaged place": len(done.problems), "tensor of another shape": done.other_shapes}
        why = ", ".join(count(number, noun) for noun, number in counts.items() if number)
        return f"no verdict: {why}; all that could be compared is equal", "magenta"
    if done.exit_code == ExitCode.NOTHING_RAN:
        return "nothing was compared: the recordings have no step and no state in common", "yellow"
    if not done.compared["digest"]:
        return "all losses and norms that both have are equal; no tensor was compared", "yellow"
    return "all that both have is equal", "green"
