"""One sitting of a search: its folder, its engine, its stages, and what it keeps after each.

    environment -> place -> causes -> least case -> commits

A stage takes what is known and gives what is known after it. Findings and page are written after
every stage, and when somebody stops the search: what was found stays, and the same command goes on.
"""

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from harness import commit, launch
from harness.bisector.alone import leave_alone
from harness.bisector.asking import Asker
from harness.bisector.causes import FoundCauses, find_causes
from harness.bisector.commit_runs import case_run, question_name
from harness.bisector.commits import CommitRange, CommitSearch, find_first_bad, resolve_range
from harness.bisector.environment import of_legs, of_nights
from harness.bisector.findings import AskedQuestion, Findings, keep_findings, read_findings
from harness.bisector.page import keep_page
from harness.bisector.probes import locate_case
from harness.bisector.questions import Budget, Identity, Journal, OutOfBudget, read_journal
from harness.bisector.repro import FOLDER
from harness.bisector.summary import where
from harness.bisector.two_cells import compare_cells
from harness.errors import Interrupted, UsageError, shown
from harness.expectations import kind_of
from harness.leftovers import clear_leftovers
from harness.lookup import DEFAULT_OUT
from harness.progress import View
from harness.records import CaseSpec, Verdict
from harness.store import LEGS, MANIFEST_FILE, CaseRuns, RunFolder

JOURNAL_FILE = "questions.jsonl"
MAX_NAME_CHARS = 120
COMMITS_FOLDER = "commits"
"""Of the folder of a search: run folders of other commits."""
Until = Literal["environment", "place", "causes", "least"]


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is searched for, and with what.

    Attributes:
        case: that failed, or is to be run first.
        place: folder with its runs; None if they are still to be made.
        out: run folder of the search; None for one under `out/` that is named after the case.
        argv: the command line.
        slots, ranks_per_gpu, jobs: room, as for a run.
        budget_runs, budget_minutes: of this sitting.
        element: whether to look for the first differing element.
        until: the last stage, of those before commits.
        repro: folder for the scenario that fails alone.
        passed: run folder of a night in which it passed, to compare environments with.
        commits: `good..bad` to search for the first bad one; "" for none.
        layout_step: to compare two layouts in, within bounds; None to search a case.
    """

    case: CaseSpec
    place: Path | None
    out: Path | None = None
    argv: Sequence[str] = ()
    slots: int | None = None
    ranks_per_gpu: int | None = None
    jobs: int | None = None
    budget_runs: int | None = None
    budget_minutes: float | None = None
    element: bool = True
    until: Until = "least"
    repro: Path = FOLDER
    passed: RunFolder | None = None
    commits: str = ""
    layout_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class State:
    """What stages work on."""

    search: Search
    asker: Asker
    runs: CaseRuns
    verdict: Verdict
    findings: Findings
    before: Findings | None = None
    """What an earlier sitting has kept."""


Stage = Callable[[State], Findings]


def bisect(search: Search, view: View) -> tuple[Findings, Path]:
    """Search, as far as the budget goes; what was found, and the folder that holds it.

    Raises:
        UsageError: the folder is of something else, or the machine cannot run the case.
        Interrupted: somebody stopped it; what was found is kept.
        Infrastructure: the disk or the engine failed.
    """
    if search.commits:
        resolve_range(_range(search))  # a slip of the pen should not cost an hour first
    prepared = launch.prepare_cases(
        [search.case], name=f"bisect-{search.case.scenario}",
        why=f"Where the failure of {search.case.id} comes from.",
        slots=search.slots, ranks_per_gpu=search.ranks_per_gpu, jobs=search.jobs,
    )  # fmt: skip
    budget = Budget(runs=search.budget_runs, minutes=search.budget_minutes)
    identity = Identity(
        code=commit.describe(), environment=kind_of(prepared.machine), case=search.case.id
    )
    folder = _folder(search, prepared, identity)
    with folder, view, Journal(folder.path / JOURNAL_FILE, identity, budget) as journal:
        clear_leftovers(folder)
        engine = launch.make_engine(prepared)
        try:
            asker = Asker(folder, engine, journal=journal, progress=view)
            return _carry_out(search, asker), folder.path
        finally:
            engine.close()


def _carry_out(search: Search, asker: Asker) -> Findings:
    folder, began_s = asker.folder.path, time.monotonic()
    before = read_findings(folder)
    if search.place is not None:
        asker.adopt(search.place, search.case)
    if search.layout_step is not None:
        return _between_layouts(search, search.layout_step, asker)
    asked = asker.ask(search.case, "does the case itself fail?")
    findings = Findings(
        case_id=search.case.id, scenario=search.case.scenario, outcome=asked.verdict.outcome,
        what=asked.verdict.what, message=asked.verdict.message, command=_again(search, folder),
    )  # fmt: skip
    state = State(
        search=search, asker=asker, runs=asked.runs, verdict=asked.verdict, findings=findings,
        before=before,
    )  # fmt: skip
    spent_s = before.seconds if before is not None else 0.0

    def keep(found: Findings) -> Findings:
        whole = _with_questions(found, asker, spent_s + time.monotonic() - began_s)
        keep_findings(folder, whole)
        keep_page(folder, whole)
        return whole

    if asked.verdict.outcome in ("passed", "skipped"):
        return keep(findings)
    names = list(STAGES)
    stages = [STAGES[name] for name in names[: names.index(search.until) + 1]]
    for stage in (*stages, _commits):
        try:
            state = replace(state, findings=stage(state))
        except Unfinished as ended:
            return keep(replace(ended.findings, stopped=str(ended)))
        except OutOfBudget as error:
            return keep(replace(state.findings, stopped=str(error)))
        except Interrupted:
            keep(replace(state.findings, stopped="interrupted"))
            raise Interrupted(
                f"interrupted; what was found is in {folder}, go on with: {findings.command}"
            ) from None
        keep(state.findings)
    return keep(state.findings)


def _between_layouts(search: Search, step: int, asker: Asker) -> Findings:
    """No two layouts are bitwise equal: the first tensor that is apart by more than rounding."""
    folder, began_s = asker.folder.path, time.monotonic()
    answer, verdict = compare_cells(search.case, step, asker)
    findings = Findings(
        case_id=search.case.id, scenario=search.case.scenario, outcome=verdict.outcome,
        what=verdict.what, message=verdict.message, command=_again(search, folder),
        place=answer.location,
    )  # fmt: skip
    whole = _with_questions(findings, asker, time.monotonic() - began_s)
    keep_findings(folder, whole)
    keep_page(folder, whole)
    return whole


def _environment(state: State) -> Findings:
    """Said before anything else: bits of other environments prove nothing about the code."""
    told = []
    if state.search.passed is not None:
        told.append(of_nights(state.search.passed, _night(state), state.search.case.id).sentence)
    if _legs_differ(state):
        told.append(of_legs(state.runs.reference, state.runs.candidate).sentence)
    failed, now = str(_night(state).manifest.get("commit", "")), commit.describe()
    if failed != now:
        told.append(f"the case failed as {shown(failed)}; further runs are made as {shown(now)}")
    return replace(state.findings, environment=tuple(told))


def _night(state: State) -> RunFolder:
    """The run folder that the failing case is of; the search's own if it was made here."""
    place = state.search.place
    if place is not None and (place.parent.parent / MANIFEST_FILE).is_file():
        return RunFolder.open(place.parent.parent)
    return state.asker.folder


def _legs_differ(state: State) -> bool:
    """Whether the legs ran in other environments: no configuration is to blame then."""
    return bool(of_legs(state.runs.reference, state.runs.candidate).facts)


def _place(state: State) -> Findings:
    place = locate_case(
        state.runs, state.asker, verdict=state.verdict, element=state.search.element
    )
    return replace(state.findings, place=place)


def _causes(state: State) -> Findings:
    """Which of the differences between the legs make it fail."""
    findings = state.findings
    if _legs_differ(state):
        return findings  # the legs differ in more than their configurations
    try:
        found = find_causes(state.runs.case, state.verdict, state.asker)
    except OutOfBudget as error:
        best = error.best if isinstance(error.best, FoundCauses) else None
        raise Unfinished(replace(findings, causes=best), str(error)) from None
    return replace(findings, causes=found)


def _least(state: State) -> Findings:
    """A scenario that fails alone, in the least ranks, layers and steps."""
    findings = state.findings
    if findings.causes is None or not findings.causes.causes:
        return findings
    kept = state.before.least_case if state.before is not None else None
    if kept is not None and kept.path and Path(kept.path).is_file():
        return replace(findings, least_case=kept)  # written by an earlier sitting
    found = leave_alone(
        state.runs.case, state.verdict, findings.causes, state.asker,
        folder=state.search.repro, place=where(findings.place),
    )  # fmt: skip
    return replace(findings, least_case=found)


def _range(search: Search) -> CommitRange:
    return CommitRange(Path.cwd(), search.commits, commit.PACKAGES)


def _commits(state: State) -> Findings:
    """The first commit on which the case fails, in a worktree of its own."""
    search, folder = state.search, state.asker.folder
    journal = state.asker.journal
    if not search.commits or journal is None:
        return state.findings
    run = case_run(folder.case_folder(search.case.id), state.verdict, folder.path / COMMITS_FOLDER)
    try:
        found = find_first_bad(
            _range(search), run, journal, name=question_name(search.case),
            cost=len(LEGS),
        )  # fmt: skip
    except OutOfBudget as error:
        best = error.best if isinstance(error.best, CommitSearch) else None
        raise Unfinished(replace(state.findings, commits=best), str(error)) from None
    return replace(state.findings, commits=found)


STAGES: dict[Until, Stage] = {
    "environment": _environment, "place": _place, "causes": _causes, "least": _least,
}  # fmt: skip
"""In this order; each may rest on those before it."""


class Unfinished(Exception):
    """A stage ended before its end; `findings` has what it knows."""

    def __init__(self, findings: Findings, why: str) -> None:
        super().__init__(why)
        self.findings = findings


def _with_questions(findings: Findings, asker: Asker, seconds: float) -> Findings:
    entries = asker.journal.entries if asker.journal is not None else ()
    asked = tuple(
        AskedQuestion(words=q.words, answer=r.words, runs=r.runs, seconds=r.seconds)
        for q, r in entries
    )
    runs = sum(question.runs for question in asked)
    return replace(findings, questions=asked, num_runs=runs, seconds=round(seconds, 3))


def _folder(search: Search, prepared: launch.Prepared, identity: Identity) -> RunFolder:
    """The folder of this search: one that is there, if it is of the same case and code."""
    first = search.out or DEFAULT_OUT / f"bisect-{search.case.id}"[:MAX_NAME_CHARS]
    number, wanted = 1, first
    while (wanted / MANIFEST_FILE).is_file():
        folder = RunFolder.open(wanted)
        is_same = bool(folder.cases) and same_question(folder.cases[0], search.case)
        if is_same and (search.out is not None or _is_current(folder, identity)):
            return folder
        if search.out is not None:
            raise UsageError(
                f"--out {wanted}: expected a search of {search.case.id} or nothing, got a run "
                "folder of something else"
            )
        number += 1
        wanted = first.with_name(f"{first.name}-{number}")
    return launch.make_folder(prepared, wanted, search.argv)


def _is_current(folder: RunFolder, identity: Identity) -> bool:
    """Whether the answers in a folder hold for this code; a search elsewhere starts anew."""
    journal = folder.path / JOURNAL_FILE
    return not journal.is_file() or read_journal(journal)[0] == identity


def same_question(one: CaseSpec, other: CaseSpec) -> bool:
    """Whether two cases ask the same of the same runs."""
    keys = [(c.reference.key, c.control.key, c.candidate.key, c.checks) for c in (one, other)]
    return keys[0] == keys[1]


def _again(search: Search, folder: Path) -> str:
    """The command line that goes on, whatever was typed first."""
    words = [word for word in search.argv if word not in ("--json",)]
    if "--out" not in words:
        words += ["--out", str(_short(folder))]
    return shlex.join(words)


def _short(folder: Path) -> Path:
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder
