"""What the user sees while a search goes on: each question with its answer, not the runs it took.

    elsewhere      1. which call differs first, up to step 3? step 3, forward, layers.0 (2 runs)
on a terminal  the same, and below it the runs under way, redrawn in place
"""

from collections.abc import Sequence
from typing import Protocol

from rich.console import Console, RenderableType
from rich.text import Text

from harness.bisector.asking import COVERS
from harness.bisector.questions import Journal, Question, Reply
from harness.bisector.summary import asked
from harness.checks.evidence import count
from harness.errors import one_line
from harness.plan import Plan
from harness.progress import LiveView, PlainView, View, duration
from harness.records import RunOutcome, RunSpec, Verdict

Entry = tuple[Question, Reply]


class SearchView(View, Protocol):
    """Who is told of runs, and of questions."""

    def answered(self, number: int, entry: Entry) -> None:
        """A question has its answer; its number is that on the page."""
        ...


def make_search_view(console: Console) -> SearchView:
    """The view that suits where the console writes to."""
    return LiveSearch(console) if console.is_terminal else PlainSearch(console)


def told_of(entries: Sequence[Entry]) -> list[Entry]:
    """Without questions whose runs were made, and told, together with those of others."""
    covered = {words for _, reply in entries for words in reply.detail.get(COVERS, ())}
    return [entry for entry in entries if entry[0].words not in covered or entry[1].runs]


def question_line(number: int, entry: Entry) -> Text:
    """A question with its answer and what it cost."""
    question, reply = entry
    line = Text(f"{number:3}. {asked(question.words)} ", overflow="fold")
    line.append(one_line(reply.words), style="bold")
    if reply.runs:
        line.append(f" ({count(reply.runs, 'run')}, {duration(reply.seconds)})", style="dim")
    return line


def tell(view: SearchView, journal: Journal) -> None:
    """Pass on the last answer of a journal, unless it was told with others."""
    told = told_of(journal.entries)
    if told and told[-1] == journal.entries[-1]:
        view.answered(len(told), told[-1])


class PlainSearch(PlainView):
    """A line for each question, for logs and CI."""

    def answered(self, number: int, entry: Entry) -> None:
        """Print it."""
        self._print(question_line(number, entry))

    def planned(self, plan: Plan) -> None:
        """Nothing: one of many questions."""

    def run_started(self, spec: RunSpec) -> None:
        """Nothing."""

    def run_finished(self, outcome: RunOutcome) -> None:
        """Nothing: the answer says what became of it."""

    def judged(self, verdict: Verdict) -> None:
        """Nothing."""


class LiveSearch(LiveView):
    """Answers scroll by; below them the runs under way."""

    def answered(self, number: int, entry: Entry) -> None:
        """Print it above the runs."""
        self.console.print(question_line(number, entry))

    def how_far(self, now_s: float) -> list[RenderableType]:
        """How many questions follow is not known."""
        return [Text(f"{count(self.done, 'run')} made, {duration(now_s - self.started_s)}")]

    def planned(self, plan: Plan) -> None:
        """Nothing: one of many questions."""

    def run_finished(self, outcome: RunOutcome) -> None:
        """One more."""
        self.active.pop(outcome.key, None)
        self.done += 1

    def judged(self, verdict: Verdict) -> None:
        """Nothing."""
