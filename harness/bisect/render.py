"""What a search has found, in words: the terminal, the page `bisect.md`, lines as it goes on.

Both are made by `print_findings`; the first three lines say what failed, where it entered and the
first thing that is wrong there. The JSON is `Findings.to_json`.
"""

import glob
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from harness.bisect.causes import FoundCauses
from harness.bisect.commits import CommitSearch
from harness.bisect.experiments import AskedQuestion, runs_key
from harness.bisect.found import Element, Location, Operator
from harness.bisect.hardware import Traced
from harness.bisect.repro import MinimalCase
from harness.checks.evidence import count
from harness.errors import one_line
from harness.records import WHATS, CaseSpec, Outcome, RunOutcome, Verdict, What
from harness.runner.plan import Plan
from harness.runner.run import View
from harness.scenario.suite import whole_id
from harness.store import SEARCH_FILE
from harness.store.files import read_object, write_atomic, write_object
from harness.terminal import COLOURS, LiveView, cell, duration, typed
from harness.values import Json, RecordError

UNKNOWN, PAGE_FILE, WIDTH, MOST_EVIDENCE = "not known", "bisect.md", 80, 8
MAX_NAME_CHARS = 120
PAGE_WIDTH = 10_000
"""Nothing is folded on the page: whoever reads it copies commands and paths."""
MAYBE_HARDWARE: tuple[What, ...] = ("nondeterministic_reference", "illegal_access")
SHOWN = ("evidence", "not known", "placements", "doubts")
OTHER_ENVIRONMENT = (
    "the runs were made in other environments, so no setting is searched for: make them alike, run "
    "again"
)


@dataclass(frozen=True, kw_only=True)
class Findings(Json):
    """All that is known of a failing case; None where a stage was not come to, or nobody asked.

    Attributes:
        outcome, what, message: its verdict.
        runs: which runs the case has, as `runs_key` says.
        command: that goes on with the search, or shows it again.
        environment: what runs or run folders differ in; said first.
        num_runs, seconds: of all calls of the command.
        stopped: why the search ended before its end; "" if it did not.
    """

    case_id: str
    scenario: str
    outcome: Outcome
    what: What
    message: str
    command: str
    runs: str = ""
    environment: tuple[str, ...] = ()
    place: Location | None = None
    causes: FoundCauses | None = None
    least_case: MinimalCase | None = None
    commits: CommitSearch | None = None
    release: CommitSearch | None = None
    hardware: Traced | None = None
    questions: tuple[AskedQuestion, ...] = ()
    num_runs: int = 0
    seconds: float = 0.0
    stopped: str = ""


def keep_findings(folder: Path, findings: Findings) -> None:
    """Write what is known, as JSON and as a page (`Infrastructure`: the disk refused)."""
    write_object(folder / SEARCH_FILE, findings)
    write_atomic(folder / PAGE_FILE, page(findings))


def read_findings(folder: Path) -> Findings | None:
    """What an earlier call has kept; None if there is none that decodes."""
    try:
        return Findings.from_json(read_object(folder / SEARCH_FILE))
    except (OSError, RecordError):
        return None


def known_of(case: CaseSpec, folder: Path) -> tuple[tuple[str, str], ...]:
    """What a search of the same runs has found, in a run folder or beside it, as `facts`."""
    name = glob.escape(search_name(case))
    for place in (folder, *sorted(folder.parent.glob(f"{name}*"))):
        found = read_findings(place)
        if found is not None and found.runs == runs_key(case):
            return tuple(facts(found))
    return ()


def search_name(case: CaseSpec) -> str:
    """Of the folder of a search, with a number where there is one already."""
    return f"bisect-{whole_id(case.scenario, case.id)}"[:MAX_NAME_CHARS]


def first_wrong(place: Location | None) -> str:
    """The first wrong tensor."""
    if place is None or not (place.tensor or place.quantity):
        return UNKNOWN
    name, quantity = place.tensor or place.quantity, place.quantity
    is_said = quantity in ("", name) or quantity.startswith("taps.")
    return name if is_said else f"{name} ({quantity})"


def element(found: Element) -> str:
    """`[3, 17]: 0x3f8a21c4 became 0x3f8a21c5, 1 ulp apart (1.07 became 1.0700001); ...`."""
    apart = "" if found.ulps is None else f", {count(found.ulps, 'ulp')} apart"
    return (
        f"{f'{list(found.index)}: ' * bool(found.index)}0x{found.reference_bits} became "
        f"0x{found.candidate_bits}{apart} ({found.reference} became {found.candidate}); "
        f"{found.num_different:,} of {count(found.numel, 'element')} differ{_where_in(found)}"
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
    told = ":" if math.prod(sizes) == found.num_different else ", within"
    return f"{told} [{', '.join(axes)}] of {list(found.shape)}"


def operator(found: Operator) -> Iterator[tuple[str, str]]:
    """Name and text: which one, a line a frame of the program, a line a tensor."""
    yield "operator", str(found)
    stacks: dict[tuple[str, ...], str] = {}
    for name, call in (("stack", found.candidate), ("stack (ref)", found.reference)):
        if call is not None:
            stacks.setdefault(call.stack, name)
    yield from ((name, frame) for stack, name in stacks.items() for frame in stack)
    for each in found.values:
        told = [each.of] * bool(each.of)
        if each.is_equal:
            told.append(f"equal: {each.candidate}")
        else:
            told += [element(each.element)] if each.element is not None else []
            told.append(f"{each.reference or 'none'} became {each.candidate or 'none'}")
        yield each.name, "; ".join(told)


def since(place: Location) -> str:
    """From which step on."""
    if place.step is None:
        return UNKNOWN
    if place.step <= 0:
        return "before step 0" if place.step else "the first step"
    equal = f"; steps 0 to {place.step - 1} are equal on every rank" * place.before_is_equal
    return f"step {place.step}{equal}"


def causes(found: FoundCauses) -> list[str]:
    """A line for each smallest set of differences that fails."""
    of = f"of {count(len(found.candidates), 'difference')} between the two runs"
    if not found.causes:
        why = found.notes if not found.num_questions else ()  # of a search that was not made
        return list(why) or [f"none found {of}"]
    lines = [str(cause) for cause in found.causes]
    blamed = {change for cause in found.causes for change in cause.changes}
    return [f"{lines[0]}; {len(blamed)} {of}", *lines[1:]]


def facts(findings: Findings) -> list[tuple[str, str]]:
    """Name and text of each line, in the order in which they are read."""
    found = findings.causes
    if findings.outcome == "passed":
        return []  # there is no place to speak of
    lines = _facts_of(findings.place) if findings.place is not None else []
    if found is not None and found.policy is not None and not found.policy.always:
        seldom = f"failed in {found.policy.failures} of {count(found.policy.trials, 'run')}"
        lines.append(("how often", seldom))
    lines += [("why", why) for why in causes(found)] if found is not None else []
    if findings.what == "different_environment":
        lines.append(("why", OTHER_ENVIRONMENT))
    is_flaky = found is not None and found.policy is not None and not found.policy.always
    if findings.hardware is None and (is_flaky or findings.what in MAYBE_HARDWARE):
        lines.append(("hardware?", "the same command with --hardware says whether it is"))
    if findings.hardware is not None:
        lines += [("follows", str(findings.hardware)), ("do next", findings.hardware.advice)]
    searched = {
        "least case": findings.least_case, "commit": findings.commits, "release": findings.release,
    }  # fmt: skip
    return lines + [(name, str(each)) for name, each in searched.items() if each is not None]


def _facts_of(place: Location) -> list[tuple[str, str]]:
    is_end = not place.tensor and place.quantity in WHATS
    lines = [
        ("where", str(place) or UNKNOWN),
        ("ended as" if is_end else "first wrong", first_wrong(place)),
    ]
    if place.element is not None:
        lines.append(("element", element(place.element)))
    if place.operator is not None:
        lines += operator(place.operator)
    if place.collective:
        lines.append(("entered", f"{place.near} {place.collective}".strip()))
    return [*lines, ("since", since(place))]


def sections(findings: Findings) -> Iterator[tuple[str, Sequence[str]]]:
    """Title and items of each list."""
    place, found, least = findings.place, findings.causes, findings.least_case
    yield "evidence", place.evidence if place else ()
    yield "not known", place.not_known if place else ()
    if found is not None:
        yield "causes", [*([str(found.policy)] if found.policy else []), *found.notes]
    yield "least case", (*least.made, *least.notes) if least else ()
    if findings.hardware is not None:
        yield "placements", findings.hardware.rows
        yield "doubts", findings.hardware.notes
    for commits in filter(None, (findings.commits, findings.release)):
        yield commits.sought, (commits.policy, *commits.notes)
    yield "asked", [question_line(question).plain for question in findings.questions]


def asked(question: AskedQuestion) -> str:
    """A question, ready for its answer."""
    told = one_line(question.words)
    return told if told.endswith("?") else f"{told}:"


def question_line(question: AskedQuestion) -> Text:
    """A question with its answer and what it cost."""
    line = Text(f"{asked(question)} ", overflow="fold")
    line.append(one_line(question.answer), style="bold")
    if question.runs:
        line.append(f" ({count(question.runs, 'run')}, {duration(question.seconds)})", style="dim")
    return line


def page(findings: Findings) -> str:
    """The page as Markdown: all that is known, as text of which nothing is read as markup."""
    file = io.StringIO()
    plain = Console(file=file, width=PAGE_WIDTH, color_system=None, force_terminal=False)
    print_findings(plain, findings)
    told = f"# {findings.outcome} {findings.what}".rstrip()
    return "\n".join([told, "", *(f"    {x}".rstrip() for x in file.getvalue().splitlines()), ""])


# --- the terminal ----------------------------------------------------------------------------


def print_findings(console: Console, findings: Findings, page: Path | None = None) -> None:
    """Print the answer; all that is known, unless the rest is on a page."""
    width, place = min(console.width, WIDTH if page else PAGE_WIDTH), findings.place
    told = f"{findings.outcome} {findings.what}".rstrip()
    head = Text(told, style=COLOURS[findings.outcome])
    console.print(head.append_text(cell(f"  {findings.case_id}", "bold")), soft_wrap=True)
    for told in findings.environment:
        console.print(cell(told, "yellow"), width=width)
    if place is None or page is None:
        console.print(cell(findings.message), width=width)
    rows = [
        (cell(name, "dim"), cell(typed(text), "bold" if number < 2 or name == "element" else ""))
        for number, (name, text) in enumerate(facts(findings))
    ]
    _print_rows(console, rows, 2, width)
    if findings.stopped:
        console.print(cell(f"not finished: {findings.stopped}", "yellow"), width=width)
    for title, items in sections(findings):
        if items and (page is None or (place is not None and title in SHOWN)):
            console.print(cell(title, "dim"))
            most = MOST_EVIDENCE if page else len(items)
            shown = [(cell(f"  {i}."), cell(x)) for i, x in enumerate(items[:most], 1)]
            more = len(items) - most
            shown += [(cell(""), cell(f"{more} more on the page"))] if more > 0 else []
            _print_rows(console, shown, 1, width)
    numbers = count(len(findings.questions), "question"), count(findings.num_runs, "run")
    spent = f"{', '.join(numbers)}, {findings.seconds:.0f} s"
    console.print(cell(f"{spent}; page {page}" if page else spent, "dim"), soft_wrap=True)
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


class PlainSearch(View):
    """A line for each question, for logs and CI: its answer says what became of the runs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def answered(self, number: int, question: AskedQuestion) -> None:
        line = Text(f"{number:3}. ").append_text(question_line(question))
        self._console.print(line, highlight=False, soft_wrap=True)


class LiveSearch(LiveView):
    """Answers scroll by; below them the runs under way."""

    def answered(self, number: int, question: AskedQuestion) -> None:
        self.console.print(Text(f"{number:3}. ").append_text(question_line(question)))

    def how_far(self, now_s: float) -> list[RenderableType]:
        """How many questions follow is not known."""
        return [Text(f"{count(self.done, 'run')} made, {duration(now_s - self.started_s)}")]

    def planned(self, plan: Plan) -> None:
        """Nothing: one of many questions."""

    def run_finished(self, outcome: RunOutcome) -> None:
        self.active.pop(outcome.key, None)
        self.done += 1

    def judged(self, verdict: Verdict) -> None:
        """Nothing."""


SearchView = PlainSearch | LiveSearch


def make_search_view(console: Console) -> SearchView:
    """The view that suits where the console writes to."""
    return LiveSearch(console) if console.is_terminal else PlainSearch(console)
