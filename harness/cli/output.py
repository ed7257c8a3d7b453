"""Tables of the commands: plans, verdicts, one case, lists of cases."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.checks import confirmation
from harness.records import OUTCOMES, CaseSpec, Difference, RankExit, RunResult, Verdict
from harness.runner.estimates import Timeline, cost
from harness.runner.plan import Plan
from harness.store.files import read_tail
from harness.terminal import COLOURS, add_row, cell, duration, plain_table, plan_line, run_text

STDERR_TAIL_BYTES, STDERR_TAIL_LINES = 8192, 15


def print_line(console: Console, text: str, style: str = "") -> None:
    """A line that is not folded, as it is."""
    console.print(Text(text, style), soft_wrap=True)


def as_text(paths: Mapping[str, Path]) -> dict[str, str]:
    """Paths of reports, for JSON."""
    return {name: str(path) for name, path in paths.items()}


def print_outcome(console: Console, verdicts: Sequence[Verdict], num_cases: int) -> None:
    """What is to be read once all is over: cases that did not pass, then counts, the line open."""
    table = plain_table("case", "outcome", "what", "message", "time")
    for verdict in verdicts:
        if verdict.outcome not in ("passed", "skipped"):
            found = verdict.confirmation
            confirmed = "" if found is None else f"; {confirmation.words(found)}"
            add_row(
                table, verdict.case_id, cell(verdict.outcome, COLOURS[verdict.outcome]),
                verdict.what, f"{verdict.message}{confirmed}", duration(verdict.wall_s),
            )  # fmt: skip
    if table.row_count:
        console.print(table)
    console.print(counts_line(verdicts, num_cases), end="")


def counts_line(verdicts: Sequence[Verdict], num_cases: int) -> Text:
    """'5 passed, 1 failed, 2 without a verdict'."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    parts = [(f"{counts[name]} {name}", COLOURS[name]) for name in OUTCOMES if counts[name]]
    if missing := num_cases - len(verdicts):
        parts.append((f"{missing} without a verdict", "yellow"))
    return Text(", ").join(Text(*part) for part in parts or [("no case", "")])


def print_plan(console: Console, plan: Plan) -> None:
    """Runs in order with ranks, device and seconds, cases that cannot run, the sum.

    A line each: a plan may have ten thousand, and rich takes half a millisecond for a row.
    """
    width = max((len(run.key) for run in plan.runs), default=0)
    for run in plan.runs:
        about, serves = duration(run.estimate_s), ", ".join(run.serves)
        row = f"{run.key:{width}} {run.spec.world_size:4} x {run.spec.device} {about:>11}  {serves}"
        console.file.write(row + "\n")
    for case in plan.skipped:
        console.file.write(cell(f"skipped  {case.id}  {case.skip_reason}").plain + "\n")
    console.print(Text(plan_line(plan)))


def print_case(
    console: Console, case: CaseSpec, verdict: Verdict | None,
    runs: Mapping[str, tuple[Path, RunResult]], *, why: str = "",
) -> None:  # fmt: skip
    """Everything a person asks about one case: verdict or why none, difference, exits."""
    console.print(cell(f"{case.id}  ({case.scenario})", "bold"), soft_wrap=True)
    if verdict is None:
        console.print(cell(f"no verdict: {why}" if why else "no verdict", "yellow"), soft_wrap=True)
    else:
        _print_verdict(console, verdict)
    results = {role: run for role, (_, run) in runs.items()}
    if words := cost(results, Timeline(results.values())).words:
        console.print(cell(words), soft_wrap=True)
    for role, (folder, run) in runs.items():
        _print_run(console, role, folder, run)


def _print_verdict(console: Console, verdict: Verdict) -> None:
    console.print(cell(f"{verdict.outcome} {verdict.what}".rstrip(), COLOURS[verdict.outcome]))
    console.print(cell(verdict.message), soft_wrap=True)
    if verdict.difference is not None:
        console.print(_difference(verdict.difference))
    if verdict.confirmation is not None:
        console.print(cell(confirmation.words(verdict.confirmation)), soft_wrap=True)
    checks = plain_table("check", "outcome", "what", "message")
    for check in verdict.checks:
        outcome = cell(check.outcome, COLOURS[check.outcome])
        add_row(checks, check.check, outcome, check.what, check.message)
    console.print(checks)


def _difference(difference: Difference) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, text in (
        ("first difference", f"step {difference.step}, rank {difference.rank}"),
        ("in", f"{difference.quantity} {difference.tensor}".strip()),
        ("reference", difference.reference),
        ("candidate", difference.candidate),
        ("ulps", "" if difference.ulps is None else difference.ulps),
    ):
        if text != "":
            add_row(table, cell(name, "dim"), text)
    return table


def _print_run(console: Console, role: str, folder: Path, run: RunResult) -> None:
    console.print(cell(f"{role}: {run_text(run.outcome)}", "bold"), soft_wrap=True)
    exits = {exit_.rank: exit_ for exit_ in run.outcome.ranks}
    table = plain_table("rank", "exit", "steps", "error")
    for records in run.ranks:
        gone, error = exits.get(records.rank), records.error
        if error is not None or gone is None or gone.code != 0 or records.problems:
            said = f"{error.type}: {error.message}" if error else "; ".join(records.problems)
            add_row(table, records.rank, _exit_word(gone), len(records.steps), said)
    if table.row_count:
        console.print(table)
    rank = run.outcome.culprit_rank
    if rank is not None and (tail := stderr_tail(folder / f"rank{rank}.stderr")):
        console.print(cell(f"last output of rank {rank}:", "dim"))
        for line in tail:
            console.print(cell(f"  {line}"), soft_wrap=True)


def stderr_tail(path: Path) -> tuple[str, ...]:
    """The last lines that a rank printed; empty if there are none, or no plain file."""
    text = read_tail(path, STDERR_TAIL_BYTES).decode(errors="replace")
    return tuple(text.splitlines()[-STDERR_TAIL_LINES:])


def _exit_word(gone: RankExit | None) -> str:
    if gone is None or gone.code is None:
        return "never started"
    by = " (by the harness)" if gone.killed_by_harness else ""
    return f"signal {-gone.code}{by}" if gone.code < 0 else f"code {gone.code}{by}"
