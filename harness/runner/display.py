"""Tables and texts of the command line. Everything from outside is text, never markup."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from harness.checks import confirmation
from harness.checks.evidence import count
from harness.errors import one_line
from harness.records import (
    OUTCOMES,
    CaseSpec,
    Difference,
    RankExit,
    RunResult,
    Verdict,
)
from harness.runner.cost import Timeline, cost
from harness.runner.plan import Plan
from harness.runner.progress import COLOURS, duration, plan_line, run_ending, run_word
from harness.store.files import read_tail

PLAIN_WIDTH = 100
"""Columns where neither a terminal nor $COLUMNS says how many there are."""
MOST_WIDTH = 10_000
_BLANKS = re.compile(r" +\n")
MAX_TABLE_ROWS = 1000
"""Beyond, lines."""
STDERR_TAIL_BYTES = 8192
STDERR_TAIL_LINES = 15


class PlainConsole(Console):
    """For pipes and files: as wide as $COLUMNS says, and wider where a table would break words."""

    def __init__(self, *, stderr: bool = False) -> None:
        columns = os.environ.get("COLUMNS", "")
        width = int(columns) if columns.isdecimal() else 0
        super().__init__(
            stderr=stderr, highlight=False, emoji=False, width=min(width, MOST_WIDTH) or PLAIN_WIDTH
        )

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as any console does, without the blanks that fill up lines."""
        usual = self.width
        for table in objects:
            if isinstance(table, Table) and "width" not in options:
                self.width = MOST_WIDTH
                _fit(self, table, usual)
        with self.capture() as captured:
            super().print(*objects, **options)
        self.width = usual
        self.file.write(_BLANKS.sub("\n", captured.get()))
        self.file.flush()


def _fit(console: Console, table: Table, width: int) -> None:
    """Fold the widest columns of a table until it has that width, but break no word."""

    def measured(renderable: RenderableType) -> Measurement:
        return Measurement.get(console, console.options, renderable)

    sizes = [
        [measured(part) for part in (column.header, *column.cells)] for column in table.columns
    ]
    least = [max(size.minimum for size in column) for column in sizes]
    most = [max(size.maximum for size in column) for column in sizes]
    room = width - (measured(table).maximum - sum(most))
    widths = most
    for widest in range(max(most, default=0), -1, -1):
        widths = [min(top, max(low, widest)) for low, top in zip(least, most, strict=True)]
        if sum(widths) <= room:
            break
    for column, size in zip(table.columns, widths, strict=True):
        column.width = size


def make_console(*, stderr: bool = False) -> Console:
    """The console of a terminal, or a plain one."""
    console = Console(stderr=stderr, highlight=False, emoji=False)
    return console if console.is_terminal else PlainConsole(stderr=stderr)


def cell(text: object, style: str = "") -> Text:
    """Text for a table, on one line."""
    return Text(one_line(str(text)), style=style, overflow="fold")


def plain_table(*columns: str) -> Table:
    """An empty table; what does not fit is folded, never cut."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def verdict_table(verdicts: Iterable[Verdict]) -> Table:
    """Case, outcome, what happened, in words, seconds."""
    table = plain_table("case", "outcome", "what", "message", "time")
    for verdict in verdicts:
        found = verdict.confirmation
        confirmed = "" if found is None else f"; {confirmation.words(found)}"
        table.add_row(
            cell(verdict.case_id),
            cell(verdict.outcome, COLOURS[verdict.outcome]),
            cell(verdict.what),
            cell(f"{verdict.message}{confirmed}"),
            cell(duration(verdict.wall_s)),
        )
    return table


def print_outcome(console: Console, verdicts: Sequence[Verdict], num_cases: int) -> None:
    """What is to be read once all is over: cases that did not pass, then counts, the line open.

    A case that was skipped said why when its line came.
    """
    bad = [verdict for verdict in verdicts if verdict.outcome not in ("passed", "skipped")]
    if bad:
        console.print(verdict_table(bad))
    console.print(counts_line(verdicts, num_cases), end="")


def counts_line(verdicts: Sequence[Verdict], num_cases: int) -> Text:
    """'5 passed, 1 failed, 2 without a verdict'."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    line = Text()
    for outcome in OUTCOMES:
        if counts[outcome]:
            line.append(", " if line else "")
            line.append(f"{counts[outcome]} {outcome}", style=COLOURS[outcome])
    if missing := num_cases - len(verdicts):
        line.append(f"{', ' if line else ''}{missing} without a verdict", style="yellow")
    return line or Text("no case")


def print_plan(console: Console, plan: Plan) -> None:
    """The plan as tables: runs in order, cases that cannot run."""
    if len(plan.runs) + len(plan.skipped) > MAX_TABLE_ROWS:
        console.file.write("".join(_plan_lines(plan)))
        console.print(Text(plan_line(plan)))
        return
    runs = plain_table("run", "ranks", "device", "about", "for")
    for run in plan.runs:
        runs.add_row(
            cell(run.key),
            cell(run.spec.world_size),
            cell(run.spec.device),
            cell(duration(run.estimate_s)),
            cell(", ".join(run.serves)),
        )
    console.print(runs)
    for case in plan.skipped:
        told = cell(f"skipped  {case.id}  {case.skip_reason}", COLOURS["skipped"])
        console.print(told, soft_wrap=True)
    console.print(Text(plan_line(plan)))


def _plan_lines(plan: Plan) -> Iterator[str]:
    """A line each: rich takes half a millisecond for a row, and longer to fold it."""
    width = max((len(run.key) for run in plan.runs), default=0)
    for run in plan.runs:
        about = duration(run.estimate_s)
        yield f"{run.key:{width}} {run.spec.world_size:5} {run.spec.device} {about:>11}"
        yield f"  {', '.join(run.serves)}\n"
    for case in plan.skipped:
        yield cell(f"skipped  {case.id}  {case.skip_reason}").plain + "\n"


def print_cases(console: Console, scenario: str, cases: Sequence[CaseSpec], *, number: int) -> None:
    """A scenario's `number` of cases, and those given, one a line."""
    console.print(cell(f"{scenario}: {count(number, 'case')}", "bold"))
    # Ids are safe as file names, and there may be tens of thousands: rich need not look at each.
    console.file.write("".join(f"  {case.id}\n" for case in cases))


def print_case(
    console: Console,
    case: CaseSpec,
    verdict: Verdict | None,
    runs: dict[str, tuple[Path, RunResult]],
    *,
    why: str = "",
) -> None:
    """Everything a person asks about one case: verdict or why none, difference, exits."""
    console.print(cell(f"{case.id}  ({case.scenario})", "bold"), soft_wrap=True)
    if verdict is None:
        console.print(cell(f"no verdict: {why}" if why else "no verdict", "yellow"), soft_wrap=True)
    else:
        console.print(cell(f"{verdict.outcome} {verdict.what}".rstrip(), COLOURS[verdict.outcome]))
        console.print(cell(verdict.message), soft_wrap=True)
        _print_difference(console, verdict.difference)
        if verdict.confirmation is not None:
            console.print(cell(confirmation.words(verdict.confirmation)), soft_wrap=True)
        checks = plain_table("check", "outcome", "what", "message")
        for check in verdict.checks:
            checks.add_row(
                cell(check.check),
                cell(check.outcome, COLOURS[check.outcome]),
                cell(check.what),
                cell(check.message),
            )
        console.print(checks)
    results = {leg: run for leg, (_, run) in runs.items()}
    if words := cost(results, Timeline(results.values())).words:
        console.print(cell(words), soft_wrap=True)
    for leg, (folder, run) in runs.items():
        _print_run(console, leg, folder, run)


def _print_difference(console: Console, difference: Difference | None) -> None:
    if difference is None:
        return
    table = Table.grid(padding=(0, 2))
    rows = {
        "first difference": f"step {difference.step}, rank {difference.rank}",
        "in": " ".join(word for word in (difference.quantity, difference.tensor) if word),
        "reference": difference.reference,
        "candidate": difference.candidate,
        "ulps apart": "" if difference.ulps is None else str(difference.ulps),
    }
    for name, text in rows.items():
        if text:
            table.add_row(cell(name, "dim"), cell(text))
    console.print(table)


def _print_run(console: Console, leg: str, folder: Path, run: RunResult) -> None:
    word = f"{run_word(run.outcome)} {run_ending(run.outcome)}"
    console.print(cell(f"{leg}: {word}", "bold"), soft_wrap=True)
    exits = {exit_.rank: exit_ for exit_ in run.outcome.ranks}
    table = plain_table("rank", "exit", "steps", "error")
    told = False
    for records in run.ranks:
        gone = exits.get(records.rank)
        wrong = records.error is not None or gone is None or gone.code != 0 or records.problems
        if not wrong:
            continue
        told = True
        error = records.error
        said = f"{error.type}: {error.message}" if error else "; ".join(records.problems)
        table.add_row(
            cell(records.rank), cell(exit_word(gone)), cell(len(records.steps)), cell(said)
        )
    if told:
        console.print(table)
    rank = run.outcome.culprit_rank
    if rank is not None and (tail := stderr_tail(folder / f"rank{rank}.stderr")):
        console.print(cell(f"last output of rank {rank}:", "dim"))
        for line in tail:
            console.print(cell(f"  {line}"), soft_wrap=True)


def exit_word(gone: RankExit | None) -> str:
    """How a rank's process ended, in words."""
    if gone is None or gone.code is None:
        return "never started"
    by = " (by the harness)" if gone.killed_by_harness else ""
    return f"signal {-gone.code}{by}" if gone.code < 0 else f"code {gone.code}{by}"


def stderr_tail(path: Path) -> tuple[str, ...]:
    """The last lines that a rank printed; empty if there are none, or no plain file."""
    text = read_tail(path, STDERR_TAIL_BYTES).decode(errors="replace")
    return tuple(text.splitlines()[-STDERR_TAIL_LINES:])
