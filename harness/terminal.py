"""What people see on a terminal: consoles, tables, times, and runs under way as they go on.

Texts from scenarios and logs are printed as they are: never read as markup, control characters
escaped. A terminal gets a live view; pipes and files one line for each event.
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
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

from harness.checks import CHECKS, confirmation
from harness.checks.evidence import count
from harness.errors import one_line
from harness.records import Outcome, RunOutcome, RunSpec, Verdict
from harness.runner.plan import Job, Plan, makespan_s
from harness.runner.run import Silent
from harness.runner.run import View as View

COLOURS: dict[Outcome, str] = {
    "passed": "green", "failed": "bold red", "error": "magenta",
    "skipped": "yellow", "incomparable": "magenta",
}  # fmt: skip
PLAIN_WIDTH, MOST_WIDTH = 100, 10_000
"""Columns where neither a terminal nor $COLUMNS says how many there are."""
_MAX_ACTIVE_LINES = 8
_BLANKS = re.compile(r" +\n")


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

    sizes = [[measured(part) for part in (c.header, *c.cells)] for c in table.columns]
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


def add_row(table: Table, *values: object) -> None:
    """A row of a table, of texts and of other values, which are printed as they are."""
    table.add_row(*(value if isinstance(value, Text) else cell(value) for value in values))


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
        line.append(f"; {one_line(confirmation.words(verdict.confirmation))}")
    for check in verdict.checks:
        is_claim = check.check in CHECKS and CHECKS[check.check].is_claim
        if verdict.outcome == "passed" and is_claim:
            line.append(f"  {one_line(check.message)}")  # what so many replays prove
    return line


def run_text(outcome: RunOutcome) -> str:
    """How a run ended, and after how long: 'done 12 s', 'crashed 3.1 s: rank 0 ...'."""
    message = f": {one_line(outcome.message)}" if outcome.message else ""
    return f"{outcome.what or 'done'} {duration(outcome.wall_s)}{message}"


# ---- runs under way


def make_view(console: Console) -> View:
    """The view that suits where the console writes to."""
    return LiveView(console) if console.is_terminal else PlainView(console)


class PlainView(Silent):
    """One line for each event, for logs and CI."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.total = self.done = 0

    def _print(self, line: str | Text) -> None:
        self.console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def planned(self, plan: Plan) -> None:
        """Print the plan."""
        self.total = len(plan.runs)
        self._print(plan_line(plan))

    def run_started(self, spec: RunSpec) -> None:
        """Print the run's key."""
        self._print(f"start        {spec.key}")

    def run_finished(self, outcome: RunOutcome) -> None:
        """Print how the run ended."""
        self.done += 1
        self._print(run_line(outcome, f" [{self.done}/{max(self.total, self.done)}]"))

    def judged(self, verdict: Verdict) -> None:
        """Print the verdict."""
        self._print(verdict_text(verdict))


def run_line(outcome: RunOutcome, number: str = "") -> str:
    """How a run ended, with its key, in columns."""
    word, _, rest = run_text(outcome).partition(" ")
    return f"{word:<12} {outcome.key}{number} {rest}"


class Forecast:
    """When the last run will have ended: the schedule of what is left, with measured times.

    Where runs turn out to take longer than the plan expects, so will the others.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._left = {run.key: Job(run.spec, run.estimate_s) for run in plan.runs}
        self._took_s = self._planned_s = 0.0

    def ended(self, outcome: RunOutcome) -> None:
        """Learn from a run. One that was not planned, or is repeated, says nothing."""
        job = self._left.pop(outcome.key, None)
        if job is not None and not outcome.what:
            self._took_s += outcome.wall_s
            self._planned_s += job.seconds

    def total_s(self, elapsed_s: float, active_s: Mapping[str, float]) -> float:
        """Seconds from the start to the end; `active_s` says how long runs have been under way."""
        slower = self._took_s / self._planned_s if self._planned_s and self._took_s else 1.0
        jobs = {key: Job(job.spec, job.seconds * slower) for key, job in self._left.items()}
        under_way = [
            Job(jobs[key].spec, max(0.0, jobs[key].seconds - since_s))
            for key, since_s in active_s.items()
            if key in jobs
        ]
        waiting = [job for key, job in jobs.items() if key not in active_s]
        plan, begun = self._plan, bool(active_s) or len(jobs) < len(self._plan.runs)
        left_s = makespan_s(waiting, slots=plan.slots, jobs=plan.jobs, under_way=under_way)
        return max(elapsed_s, 0.0 if begun else plan.start_s) + left_s


class LiveView(PlainView):
    """Verdicts scroll by; below them a bar and the runs under way, redrawn in place."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console)
        self.clock = clock
        self.active: dict[str, float] = {}
        self.forecast: Forecast | None = None
        self.total_s, self.started_s = 0.0, clock()
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
        """The bar and the active runs."""
        now = self.clock()
        bar = Table.grid(padding=(0, 1))
        bar.add_row(self.spinner, *self.how_far(now))
        lines = [
            Text(f"  {key}  {duration(now - since)}", style="dim", overflow="ellipsis")
            for key, since in list(self.active.items())[:_MAX_ACTIVE_LINES]
        ]
        return Group(bar, *lines)

    def how_far(self, now_s: float) -> list[RenderableType]:
        """What is shown next to the spinner."""
        elapsed_s, total = now_s - self.started_s, max(self.total, self.done)
        return [
            ProgressBar(total=max(1, total), completed=self.done, width=30),
            Text(f"{self.done}/{total} runs"),
            Text(f"{duration(elapsed_s)} of about {duration(max(elapsed_s, self.total_s))}"),
        ]

    def planned(self, plan: Plan) -> None:
        """Print the plan, and set the scale of the bar."""
        super().planned(plan)
        self.forecast, self.total_s = Forecast(plan), plan.estimate_s

    def run_started(self, spec: RunSpec) -> None:
        """Show the run as active."""
        self.active[spec.key] = self.clock()

    def run_finished(self, outcome: RunOutcome) -> None:
        """Move the bar; a run that did not end well is worth a line."""
        self.active.pop(outcome.key, None)
        self.done += 1
        if self.forecast is not None:
            # At each event, not at each redrawing: a plan may have ten thousand runs.
            self.forecast.ended(outcome)
            now = self.clock()
            active = {key: now - since for key, since in self.active.items()}
            self.total_s = self.forecast.total_s(now - self.started_s, active)
        if outcome.what:
            self._print(Text(run_line(outcome), style="dim"))
