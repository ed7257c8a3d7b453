"""What people see on a terminal: consoles, tables, one case, and runs under way as they go on.

Texts from scenarios and logs are printed as they are: never read as markup, control characters
escaped. A terminal gets a live view; pipes and files one line for each event.
"""

import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from harness.checks import CHECKS
from harness.checks.evidence import count
from harness.checks.judge import confirmation_words
from harness.engine.evidence import tail_of
from harness.errors import one_line
from harness.records import (
    OUTCOMES,
    CaseSpec,
    Difference,
    Outcome,
    RankExit,
    RunOutcome,
    RunResult,
    RunSpec,
    Verdict,
)
from harness.runner.plan import Plan, Timeline, cost
from harness.runner.run import View

COLOURS: dict[Outcome, str] = {
    "passed": "green", "failed": "bold red", "error": "magenta",
    "skipped": "yellow", "incomparable": "magenta",
}  # fmt: skip
PLAIN_WIDTH, MOST_WIDTH = 100, 10_000
"""Columns where neither a terminal nor $COLUMNS says how many there are."""
_MAX_ACTIVE_LINES = 8
_BLANKS = re.compile(r" +\n")
STDERR_TAIL_BYTES, STDERR_TAIL_LINES = 8192, 15


class PlainConsole(Console):
    """For pipes and files: as wide as $COLUMNS says, and wider where a table would break words."""

    def __init__(self, *, stderr: bool = False) -> None:
        columns = os.environ.get("COLUMNS", "")
        width = min(int(columns) if columns.isdecimal() else 0, MOST_WIDTH) or PLAIN_WIDTH
        super().__init__(stderr=stderr, highlight=False, emoji=False, width=width)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as any console does, without the blanks that fill up lines."""
        usual = self.width
        for table in objects:
            if isinstance(table, Table) and "width" not in options:
                self.width = MOST_WIDTH
                self._fit(table, usual)
        with self.capture() as captured:
            super().print(*objects, **options)
        self.width = usual
        self.file.write(_BLANKS.sub("\n", captured.get()))
        self.file.flush()

    def _fit(self, table: Table, width: int) -> None:
        """Fold the widest columns of a table until it has that width, but break no word."""
        sizes = [[Measurement.get(self, self.options, part) for part in (c.header, *c.cells)]
                 for c in table.columns]  # fmt: skip
        least = [max(size.minimum for size in column) for column in sizes]
        widths = most = [max(size.maximum for size in column) for column in sizes]
        room = width - (Measurement.get(self, self.options, table).maximum - sum(most))
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


def print_table(console: Console, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """A table, unless it is empty; values that are no texts are printed as they are.

    What does not fit is folded, never cut.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(value if isinstance(value, Text) else cell(value) for value in row))
    if table.row_count:
        console.print(table)


def markdown_table(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table of Markdown, of texts that are escaped already."""
    columns = tuple(columns)
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]


def print_line(console: Console, text: object, style: str = "") -> None:
    """A line that is not folded."""
    console.print(text if isinstance(text, Text) else cell(text, style), soft_wrap=True)


def typed(command: str) -> str:
    """A command that begins with `harness`, as it works here; other texts as they are."""
    is_ours = command.startswith("harness ") and "harness" in Path(sys.argv[0]).parts[-2:]
    return f"{sys.executable} -m {command}" if is_ours and not shutil.which("harness") else command


def duration(seconds: float) -> str:
    """'0.4 s', '12 s', '3 min 5 s', '2 h 10 min'."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return " ".join([f"{minutes} min"] * bool(minutes) + [f"{rest} s"] * bool(rest or not minutes))


def plan_line(plan: Plan) -> str:
    """The plan in one line."""
    skipped = f", {len(plan.skipped)} skipped" if plan.skipped else ""
    return (
        f"{count(len(plan.cases) - len(plan.skipped), 'case')}{skipped}, "
        f"{count(len(plan.runs), 'run')} on {count(plan.slots, 'slot')}, "
        f"about {duration(plan.estimate_s)}"
    )


def verdict_text(verdict: Verdict) -> Text:
    """A verdict as one line: outcome, case, what, message."""
    line = Text(overflow="fold")
    line.append(f"{verdict.outcome:<12}", style=COLOURS[verdict.outcome])
    line.append(f" {verdict.case_id}")
    if verdict.outcome != "passed":
        line.append(f"  {verdict.what}: {one_line(verdict.message)}")
    if verdict.confirmation is not None:
        line.append(f"; {one_line(confirmation_words(verdict.confirmation))}")
    for check in verdict.checks:
        is_claim = check.check in CHECKS and CHECKS[check.check].is_claim
        if verdict.outcome == "passed" and is_claim:
            line.append(f"  {one_line(check.message)}")  # what so many replays prove
    return line


def run_text(outcome: RunOutcome) -> str:
    """How a run ended, and after how long: 'done 12 s', 'crashed 3.1 s: rank 0 ...'."""
    message = f": {one_line(outcome.message)}" if outcome.message else ""
    return f"{outcome.what or 'done'} {duration(outcome.wall_s)}{message}"


# ---- plans, verdicts, one case


def print_outcome(console: Console, verdicts: Sequence[Verdict], num_cases: int) -> None:
    """What is to be read once all is over: cases that did not pass, then counts, the line open."""
    rows = []
    for verdict in verdicts:
        if verdict.outcome not in ("passed", "skipped"):
            found = verdict.confirmation
            confirmed = "" if found is None else f"; {confirmation_words(found)}"
            rows.append((
                verdict.case_id, cell(verdict.outcome, COLOURS[verdict.outcome]), verdict.what,
                f"{verdict.message}{confirmed}", duration(verdict.wall_s),
            ))  # fmt: skip
    print_table(console, ("case", "outcome", "what", "message", "time"), rows)
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
    print_line(console, f"{case.id}  ({case.scenario})", "bold")
    if verdict is None:
        print_line(console, f"no verdict: {why}" if why else "no verdict", "yellow")
    else:
        _print_verdict(console, verdict)
    results = {role: run for role, (_, run) in runs.items()}
    if words := cost(results, Timeline(results.values())).words:
        print_line(console, words)
    for role, (folder, run) in runs.items():
        _print_run(console, role, folder, run)


def _print_verdict(console: Console, verdict: Verdict) -> None:
    console.print(cell(f"{verdict.outcome} {verdict.what}".rstrip(), COLOURS[verdict.outcome]))
    print_line(console, verdict.message)
    if verdict.difference is not None:
        console.print(_difference(verdict.difference))
    if verdict.confirmation is not None:
        print_line(console, confirmation_words(verdict.confirmation))
    rows = ((check.check, cell(check.outcome, COLOURS[check.outcome]), check.what, check.message)
            for check in verdict.checks)  # fmt: skip
    print_table(console, ("check", "outcome", "what", "message"), rows)


def _difference(difference: Difference) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, text in (
        ("first difference", f"step {difference.step}, rank {difference.rank}"),
        ("in", f"{difference.quantity} {difference.tensor}".strip()),
        ("reference", difference.reference),
        ("candidate", difference.candidate),
        ("ulps", "" if difference.ulps is None else str(difference.ulps)),
    ):
        if text:
            table.add_row(cell(name, "dim"), cell(text))
    return table


def _print_run(console: Console, role: str, folder: Path, run: RunResult) -> None:
    print_line(console, f"{role}: {run_text(run.outcome)}", "bold")
    exits, rows = {exit_.rank: exit_ for exit_ in run.outcome.ranks}, []
    for records in run.ranks:
        gone, error = exits.get(records.rank), records.error
        if error is not None or gone is None or gone.code != 0 or records.problems:
            said = f"{error.type}: {error.message}" if error else "; ".join(records.problems)
            rows.append((records.rank, _exit_word(gone), len(records.steps), said))
    print_table(console, ("rank", "exit", "steps", "error"), rows)
    rank = run.outcome.culprit_rank
    tail = "" if rank is None else tail_of(folder / f"rank{rank}.stderr", STDERR_TAIL_BYTES)
    if lines := tail.splitlines()[-STDERR_TAIL_LINES:]:
        print_line(console, f"last output of rank {rank}:", "dim")
        for line in lines:
            print_line(console, f"  {line}")


def _exit_word(gone: RankExit | None) -> str:
    if gone is None or gone.code is None:
        return "never started"
    by = " (by the harness)" if gone.killed_by_harness else ""
    return f"signal {-gone.code}{by}" if gone.code < 0 else f"code {gone.code}{by}"


# ---- runs under way


def make_view(console: Console) -> View:
    """The view that suits where the console writes to."""
    return LiveView(console) if console.is_terminal else PlainView(console)


class PlainView(View):
    """One line for each event, for logs and CI."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.total = self.done = 0

    def planned(self, plan: Plan) -> None:
        self.total = len(plan.runs)
        print_line(self.console, plan_line(plan))

    def run_started(self, spec: RunSpec) -> None:
        print_line(self.console, f"start        {spec.key}")

    def run_finished(self, outcome: RunOutcome) -> None:
        self.done += 1
        number = f" [{self.done}/{max(self.total, self.done)}]"
        print_line(self.console, run_line(outcome, number))

    def judged(self, verdict: Verdict) -> None:
        print_line(self.console, verdict_text(verdict))


def run_line(outcome: RunOutcome, number: str = "") -> str:
    """How a run ended, with its key, in columns."""
    word, _, rest = run_text(outcome).partition(" ")
    return f"{word:<12} {outcome.key}{number} {rest}"


class LiveView(PlainView):
    """Verdicts scroll by; below them a bar and the runs under way, redrawn in place."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console)
        self.clock, self.started_s = clock, clock()
        self.active: dict[str, float] = {}
        self.left_s: dict[str, float] = {}
        self.estimate_s = self.work_s = self.done_s = 0.0
        self.spinner = Spinner("dots")
        self.live = Live(
            console=console, get_renderable=self.render, refresh_per_second=8, transient=True
        )

    def __enter__(self) -> Self:
        self.started_s = self.clock()
        self.live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.live.stop()

    def render(self) -> RenderableType:
        now = self.clock()
        bar = Table.grid(padding=(0, 1))
        bar.add_row(self.spinner, *self.how_far(now))
        lines = [
            Text(f"  {key}  {duration(now - since)}", style="dim", overflow="ellipsis")
            for key, since in list(self.active.items())[:_MAX_ACTIVE_LINES]
        ]
        return Group(bar, *lines)

    def how_far(self, now_s: float) -> list[RenderableType]:
        total = max(self.total, self.done)
        return [
            ProgressBar(total=max(1, total), completed=self.done, width=30),
            Text(f"{self.done}/{total} runs"),
            Text(f"{duration(now_s - self.started_s)} of about {duration(self.total_s(now_s))}"),
        ]

    def total_s(self, now_s: float) -> float:
        """Seconds from start to end, by how much of the expected work the time so far has done."""
        elapsed_s, active = now_s - self.started_s, self.active.items()
        under_way = (min(now_s - since, self.left_s.get(key, 0.0)) for key, since in active)
        if not self.done_s:
            return max(elapsed_s, self.estimate_s)
        return max(elapsed_s, elapsed_s * self.work_s / (self.done_s + sum(under_way)))

    def planned(self, plan: Plan) -> None:
        super().planned(plan)
        self.left_s = {run.key: run.estimate_s for run in plan.runs}
        self.estimate_s, self.work_s = plan.estimate_s, sum(self.left_s.values())

    def run_started(self, spec: RunSpec) -> None:
        self.active[spec.key] = self.clock()

    def run_finished(self, outcome: RunOutcome) -> None:
        """Move the bar; a run that did not end well is worth a line."""
        self.active.pop(outcome.key, None)
        self.done += 1
        self.done_s += self.left_s.pop(outcome.key, 0.0)
        if outcome.what:
            print_line(self.console, run_line(outcome), "dim")
