"""What the user sees while runs are under way: a live view on a terminal, plain lines elsewhere.

Both take the same four calls, in this order for each case: `planned` once, `run_started` and
`run_finished` for each run made, `judged` for each case. Texts from scenarios and logs are printed
as they are: never read as markup, control characters escaped.
"""

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from harness.checks import CHECKS, confirmation
from harness.checks.evidence import count
from harness.errors import one_line
from harness.records import Outcome, RunOutcome, RunSpec, Verdict
from harness.runner.plan import Plan

COLOURS: dict[Outcome, str] = {
    "passed": "green", "failed": "bold red", "error": "magenta",
    "skipped": "yellow", "incomparable": "magenta",
}  # fmt: skip
_MAX_ACTIVE_LINES = 8


class View(Protocol):
    """What reports progress; entered before the first call, left after the last."""

    def planned(self, plan: Plan) -> None:
        """The plan is made; runs follow."""
        ...

    def run_started(self, spec: RunSpec) -> None:
        """A run has been started."""
        ...

    def run_finished(self, outcome: RunOutcome) -> None:
        """A run has ended."""
        ...

    def judged(self, verdict: Verdict) -> None:
        """A case has its verdict."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def make_view(console: Console) -> View:
    """The view that suits where the console writes to."""
    return LiveView(console) if console.is_terminal else PlainView(console)


def duration(seconds: float) -> str:
    """'0.4 s', '12 s', '3 min 5 s', '2 h 10 min'."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def plan_line(plan: Plan) -> str:
    """The plan in one line."""
    num = len(plan.cases) - len(plan.skipped)
    skipped = f", {len(plan.skipped)} skipped" if plan.skipped else ""
    return (
        f"{count(num, 'case')}{skipped}, {count(len(plan.runs), 'run')} on "
        f"{count(plan.slots, 'slot')}, "
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


class PlainView:
    """One line for each event, for logs and CI."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.total = self.done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def _print(self, line: str | Text) -> None:
        self.console.print(
            line, markup=False, highlight=False, emoji=False, soft_wrap=True
        )  # fmt: skip

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
        count = f"[{self.done}/{max(self.total, self.done)}]"
        self._print(f"{run_word(outcome):<12} {outcome.key} {count} {run_ending(outcome)}")

    def judged(self, verdict: Verdict) -> None:
        """Print the verdict."""
        self._print(verdict_text(verdict))


def run_word(outcome: RunOutcome) -> str:
    """`done`, or what ended the run."""
    return outcome.what or "done"


def run_ending(outcome: RunOutcome) -> str:
    """Time taken, and the message if there is one."""
    message = f": {one_line(outcome.message)}" if outcome.message else ""
    return f"{duration(outcome.wall_s)}{message}"


class Forecast:
    """When the runs of a plan will have ended, by what those that ended took.

    A run's part of the work is its expected seconds times its ranks. Until a run has ended, the
    plan's estimate is all that is known.
    """

    def __init__(self, plan: Plan) -> None:
        self._estimate_s = plan.estimate_s
        self._expected = {run.key: (run.estimate_s, run.spec.world_size) for run in plan.runs}
        self._work = sum(seconds * ranks for seconds, ranks in self._expected.values())
        self._done = self._took_s = self._planned_s = 0.0

    def ended(self, outcome: RunOutcome) -> None:
        """Learn from a run. One that was not planned, or is made again, says nothing."""
        seconds, ranks = self._expected.pop(outcome.key, (0.0, 0))
        self._done += seconds * ranks
        if ranks and not outcome.what:
            self._took_s += outcome.wall_s
            self._planned_s += seconds

    def total_s(self, elapsed_s: float, active_s: Mapping[str, float]) -> float:
        """Seconds from the start to the end.

        Args:
            elapsed_s: since the start.
            active_s: runs under way, and for how long each has been.
        """
        if not self._planned_s or not self._took_s:
            return max(self._estimate_s, elapsed_s)
        slower, done = self._took_s / self._planned_s, self._done
        for key, seconds in active_s.items():
            expected_s, ranks = self._expected.get(key, (0.0, 0))
            done += ranks * min(expected_s, seconds / slower)
        return elapsed_s * max(1.0, self._work / done)


class LiveView:
    """Verdicts scroll by; below them a bar and the runs under way, redrawn in place."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self.clock = clock
        self.total = self.done = 0
        self.active: dict[str, float] = {}
        self.forecast: Forecast | None = None
        self.started_s = clock()
        self.spinner = Spinner("dots")
        self.live = Live(
            console=console, get_renderable=self.render, refresh_per_second=8, transient=True
        )

    def __enter__(self) -> Self:
        self.started_s = self.clock()
        self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        """What stands beside the spinner."""
        elapsed_s = total_s = now_s - self.started_s
        if self.forecast is not None:
            active = {key: now_s - since for key, since in self.active.items()}
            total_s = self.forecast.total_s(elapsed_s, active)
        return [
            ProgressBar(total=max(1, self.total), completed=self.done, width=30),
            Text(f"{self.done}/{self.total} runs"),
            Text(f"{duration(elapsed_s)} of about {duration(total_s)}"),
        ]

    def planned(self, plan: Plan) -> None:
        """Set the scale of the bar."""
        self.total, self.forecast = len(plan.runs), Forecast(plan)
        self.console.print(Text(plan_line(plan)))

    def run_started(self, spec: RunSpec) -> None:
        """Show the run as active."""
        self.active[spec.key] = self.clock()

    def run_finished(self, outcome: RunOutcome) -> None:
        """Move the bar; a run that did not end well is worth a line."""
        self.active.pop(outcome.key, None)
        self.done += 1
        if self.forecast is not None:
            self.forecast.ended(outcome)
        self.total = max(self.total, self.done)
        if outcome.what:
            text = f"{run_word(outcome):<12} {outcome.key} {run_ending(outcome)}"
            self.console.print(Text(text, style="dim"))

    def judged(self, verdict: Verdict) -> None:
        """Print the verdict above the bar."""
        self.console.print(verdict_text(verdict))
