"""`harness diff A B`: where two recordings differ first, in what both have."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from harness.checks.evidence import count, show_ranks
from harness.cli import options
from harness.cli.options import PATH
from harness.records import ExitCode
from harness.runner.diff import Comparison, Finding, Kind, compare
from harness.terminal import cell, make_console, print_line, print_table

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
@options.as_json
def diff_command(*, a: Path, b: Path, as_json: bool) -> int:
    """Compare two recordings: environments first, then the first difference in what both have.

    A and B are folders of jobs that recorded themselves, record(folder=...), of harness wrap, or of
    a run in a run folder, RUN/runs/KEY. They may be of other lengths, ranks or intervals.
    """
    done = compare(a, b)
    if as_json:
        options.print_json(done.to_json() | {"exit_code": int(done.exit_code)})
    else:
        print_diff(make_console(), done)
    return done.exit_code


def print_diff(console: Console, done: Comparison) -> None:
    """Both sides, their environments, what differs, what was compared, and the answer."""
    sides = {"A": done.a, "B": done.b}
    for name, side in sides.items():
        console.print(cell(f"{name}  {side['path']}: {_words(side)}", "bold"))
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


def _words(side: Mapping[str, Any]) -> str:
    """`ranks 0 and 1 of 2; steps 0 to 99, 10 of them with digests; ended`."""
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
