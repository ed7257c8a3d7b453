"""What a search has found, in words, and what the user sees while it goes on: all that people read.

facts         name and text of each line; the first three say what failed, where it entered, and
              the first thing that is wrong there
sections      lists below them: evidence, what is not known, questions
page          both as Markdown, `bisect.md`, for people who were not there; the terminal has the
              facts and the first sections; JSON is `Findings.to_json`
SearchView    1. which call differs first, up to step 3? step 3, forward, layers.0 (2 runs)
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from harness.bisect.causes import FoundCauses
from harness.bisect.commits import CommitSearch
from harness.bisect.experiments import AskedQuestion
from harness.bisect.found import Element, Location
from harness.bisect.repro import Alone
from harness.checks.evidence import count
from harness.codec import Json, RecordError, dumps
from harness.errors import one_line
from harness.records import WHATS, Outcome, RunOutcome, RunSpec, Verdict, What
from harness.runner.plan import Plan
from harness.store import SEARCH_FILE
from harness.store.files import read_object, with_checksum, write_atomic
from harness.terminal import COLOURS, LiveView, PlainView, View, cell, duration, typed

UNKNOWN, PAGE_FILE, WIDTH, MOST_EVIDENCE = "not known", "bisect.md", 80, 8
OTHER_ENVIRONMENT = (
    "the runs were made in other environments, so no setting is searched for: make them alike, run "
    "again"
)


@dataclass(frozen=True, kw_only=True)
class Findings(Json):
    """All that is known of a failing case.

    Attributes:
        case_id, scenario: which case.
        outcome, what, message: its verdict.
        command: that goes on with the search, or shows it again.
        environment: what runs or run folders differ in; said first.
        place: where the fault entered; None before that stage.
        causes: smallest sets of differences that still fail; None before that stage, or if nobody
            asked.
        least_case: the scenario that fails alone; None before that stage, or if nobody asked.
        commits: the first bad one, or the range of suspects; None if nobody asked.
        release: of a package, the same.
        questions: what was asked, in order.
        num_runs: made in all sittings.
        seconds: spent in all sittings.
        stopped: why the search ended before its end; "" if it did not.
    """

    case_id: str
    scenario: str
    outcome: Outcome
    what: What
    message: str
    command: str
    environment: tuple[str, ...] = ()
    place: Location | None = None
    causes: FoundCauses | None = None
    least_case: Alone | None = None
    commits: CommitSearch | None = None
    release: CommitSearch | None = None
    questions: tuple[AskedQuestion, ...] = ()
    num_runs: int = 0
    seconds: float = 0.0
    stopped: str = ""


def keep_findings(folder: Path, findings: Findings) -> None:
    """Write what is known, as JSON and as a page (`Infrastructure`: the disk refused)."""
    write_atomic(folder / SEARCH_FILE, dumps(with_checksum(findings)) + "\n")
    write_atomic(folder / PAGE_FILE, page(findings))


def read_findings(folder: Path) -> Findings | None:
    """What an earlier sitting has kept; None if there is none that decodes."""
    try:
        return Findings.from_json(read_object(folder / SEARCH_FILE))
    except (OSError, RecordError):
        return None


def first_wrong(place: Location | None) -> str:
    """The first wrong tensor."""
    if place is None or not (place.tensor or place.quantity):
        return UNKNOWN
    name = place.tensor or place.quantity
    is_said = place.quantity in ("", name) or place.quantity.startswith("taps.")
    of = "" if is_said else f" ({place.quantity})"
    return f"{name}{of}"


def element(found: Element) -> str:
    """`[3, 17]: 0x3f8a21c4 became 0x3f8a21c5, 1 ulp apart (1.07 became 1.0700001); ...`."""
    index = ", ".join(map(str, found.index))
    is_float = "float" in found.dtype
    apart = "" if found.ulps is None or not is_float else f", {count(found.ulps, 'ulp')} apart"
    return (
        f"[{index}]: 0x{found.reference_bits} became 0x{found.candidate_bits}{apart} "
        f"({found.reference} became {found.candidate}); "
        f"{found.num_different} of {count(found.numel, 'element')} differ{_where_in(found)}"
    )


def _where_in(found: Element) -> str:
    """`: [:, :, 63]`, `, within [0:2, :, 63]` if some in it are equal; "" if all over."""
    bounds = list(zip(found.lows, found.highs, found.shape, strict=True))
    sizes = [high - low + 1 for low, high, _ in bounds]
    if found.num_different == 1 or sizes == list(found.shape):
        return ""
    axes = [
        ":" if size == whole and whole > 1 else str(low) if size == 1 else f"{low}:{high + 1}"
        for (low, high, whole), size in zip(bounds, sizes, strict=True)
    ]
    told = "" if math.prod(sizes) == found.num_different else ", within"
    return f"{told or ':'} [{', '.join(axes)}] of {list(found.shape)}"


def since(place: Location | None) -> str:
    """From which step on."""
    if place is None or place.step is None:
        return UNKNOWN
    if place.step < 0:
        return "before step 0"
    if place.step == 0:
        return "the first step"
    if not place.before_is_equal:
        return f"step {place.step}"
    before = "step 0 is" if place.step == 1 else f"steps 0 to {place.step - 1} are"
    return f"step {place.step}; {before} equal on every rank"


def causes(found: FoundCauses | None) -> list[str]:
    """A line for each smallest set of differences that fails."""
    if found is None:
        return []
    num = len(found.candidates)
    of = f"of {count(num, 'difference')} between the two runs"
    if not found.causes:
        why = found.notes if not found.num_questions else ()  # of a search that was not made
        return list(why) or [f"none found {of}"]
    lines = [str(cause) for cause in found.causes]
    blamed = {change for cause in found.causes for change in cause.changes}
    lines[0] += f"; {len(blamed)} {of}"
    return lines


def facts(findings: Findings) -> list[tuple[str, str]]:
    """Name and text of each line, in the order in which they are read."""
    place, found = findings.place, findings.causes
    if findings.outcome == "passed":
        return []  # there is no place to speak of
    is_end = place is not None and not place.tensor and place.quantity in WHATS
    lines = [
        ("where", str(place or "") or UNKNOWN),
        ("ended as" if is_end else "first wrong", first_wrong(place)),
    ]
    if place is not None and place.element is not None:
        lines.append(("element", element(place.element)))
    if place is not None and place.collective:
        lines.append(("entered", f"{place.near} {place.collective}".strip()))
    lines.append(("since", since(place)))
    if found is not None and found.policy is not None and not found.policy.always:
        seldom = f"failed in {found.policy.failures} of {count(found.policy.trials, 'run')}"
        lines.append(("how often", seldom))
    lines += [("why", why) for why in causes(found)]
    if findings.what == "different_environment":
        lines.append(("why", OTHER_ENVIRONMENT))
    searched = {
        "least case": findings.least_case, "commit": findings.commits, "release": findings.release,
    }  # fmt: skip
    return lines + [(name, str(each)) for name, each in searched.items() if each is not None]


def sections(findings: Findings) -> Iterator[tuple[str, Sequence[str], bool]]:
    """Title and items of each list, and whether its items are numbered."""
    place, found = findings.place, findings.causes
    least, commits = findings.least_case, findings.commits
    yield "Evidence", place.evidence if place else (), True
    yield "Not known", place.unknown if place else (), False
    if found is not None:
        yield "Causes", [*([str(found.policy)] if found.policy else []), *found.notes], False
    yield "Least case", (*least.made, *least.notes) if least else (), False
    yield "Commits", (commits.policy, *commits.notes) if commits else (), False
    questions = [
        f"{asked(q.words)} {q.answer}"
        + (f" ({count(q.runs, 'run')}, {q.seconds:.1f} s)" if q.runs else "")
        for q in findings.questions
    ]
    yield f"Asked ({spent(findings)})", questions, True


def spent(findings: Findings) -> str:
    """`2 questions, 4 runs, 38 s`."""
    return (
        f"{count(len(findings.questions), 'question')}, {count(findings.num_runs, 'run')}, "
        f"{findings.seconds:.0f} s"
    )


def asked(words: str) -> str:
    """A question, ready for its answer."""
    told = one_line(words)
    return told if told.endswith("?") else f"{told}:"


# --- the page --------------------------------------------------------------------------------


def page(findings: Findings) -> str:
    """The page as Markdown; nothing from outside is read as markup."""
    case_id = one_line(findings.case_id).replace("`", "")
    lines = [f"# `{case_id}`: {findings.outcome} {findings.what}".rstrip(), ""]
    for told in findings.environment:
        lines += [f"**Environment:** {_plain(told)}", ""]
    if findings.stopped:
        lines += [f"**Not finished:** {_plain(findings.stopped)}", ""]
    lines += ["| | |", "| --- | --- |"]
    lines += [f"| {name} | {_plain(text)} |" for name, text in facts(findings)]
    lines += ["", f"Verdict: {_plain(findings.message)}", ""]
    for title, items, numbered in sections(findings):
        if items:
            marks = [f"{i}." if numbered else "-" for i in range(1, len(items) + 1)]
            rows = [f"{mark} {_plain(item)}" for mark, item in zip(marks, items, strict=True)]
            lines += [f"## {title}", "", *rows, ""]
    return "\n".join([*lines, "## Again", "", f"    {one_line(findings.command)}", ""])


def _plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    escaped = one_line(text)
    for mark in "\\`*_[]<>#|":
        escaped = escaped.replace(mark, f"\\{mark}")
    return escaped


# --- the terminal ----------------------------------------------------------------------------


def print_findings(console: Console, findings: Findings, page: Path) -> None:
    """Print the answer; the rest is on the page."""
    width = min(console.width, WIDTH)
    told = f"{findings.outcome} {findings.what}".rstrip()
    head = Text(told, style=COLOURS[findings.outcome])
    head.append_text(cell(f"  {findings.case_id}", "bold"))
    console.print(head, soft_wrap=True)
    for told in findings.environment:
        console.print(cell(told, "yellow"), width=width)
    if findings.place is None:
        console.print(cell(findings.message), width=width)
    rows = [
        (cell(name, "dim"), cell(typed(text), "bold" if number < 2 or name == "element" else ""))
        for number, (name, text) in enumerate(facts(findings))
    ]
    _print_rows(console, rows, 2, width)
    if findings.stopped:
        console.print(cell(f"not finished: {findings.stopped}", "yellow"), width=width)
    for title, items, _ in sections(findings) if findings.place is not None else ():
        if items and title in ("Evidence", "Not known"):
            console.print(cell(title.lower(), "dim"))
            shown = [(cell(f"  {i}."), cell(each)) for i, each in enumerate(items, 1)]
            more = f"{len(items) - MOST_EVIDENCE} more on the page"
            rest = [(cell(""), cell(more))] if len(items) > MOST_EVIDENCE else []
            _print_rows(console, [*shown[:MOST_EVIDENCE], *rest], 1, width)
    console.print(cell(f"{spent(findings)}; page {page}", "dim"), soft_wrap=True)
    console.print(cell(f"again: {typed(findings.command)}", "dim"), soft_wrap=True)


def _print_rows(
    console: Console, rows: Sequence[tuple[Text, Text]], padding: int, width: int
) -> None:
    table = Table.grid(padding=(0, padding))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table, width=width)


class SearchView(View, Protocol):
    """Who is told of runs, and of questions."""

    def answered(self, number: int, question: AskedQuestion) -> None:
        """A question has its answer; its number is that on the page."""
        ...


def make_search_view(console: Console) -> SearchView:
    """The view that suits where the console writes to."""
    return LiveSearch(console) if console.is_terminal else PlainSearch(console)


def question_line(number: int, question: AskedQuestion) -> Text:
    """A question with its answer and what it cost."""
    line = Text(f"{number:3}. {asked(question.words)} ", overflow="fold")
    line.append(one_line(question.answer), style="bold")
    if question.runs:
        line.append(f" ({count(question.runs, 'run')}, {duration(question.seconds)})", style="dim")
    return line


class PlainSearch(PlainView):
    """A line for each question, for logs and CI: its answer says what became of the runs."""

    def answered(self, number: int, question: AskedQuestion) -> None:
        """Print it."""
        self._print(question_line(number, question))

    def planned(self, plan: Plan) -> None:
        """Nothing: one of many questions."""

    def run_started(self, spec: RunSpec) -> None:
        """Nothing."""

    def run_finished(self, outcome: RunOutcome) -> None:
        """Nothing."""

    def judged(self, verdict: Verdict) -> None:
        """Nothing."""


class LiveSearch(LiveView):
    """Answers scroll by; below them the runs under way."""

    def answered(self, number: int, question: AskedQuestion) -> None:
        """Print it above the runs."""
        self.console.print(question_line(number, question))

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
