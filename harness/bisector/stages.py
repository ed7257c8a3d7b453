"""What a search is asked, and its stages: from what is known to what is known after it.

environment -> place -> causes -> layers -> least case -> commits -> releases
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from harness import commit
from harness.bisector.alone import leave_alone
from harness.bisector.asking import Asker
from harness.bisector.causes import FoundCauses, find_causes
from harness.bisector.chance import Patience
from harness.bisector.commit_range import CommitRange, resolve_range
from harness.bisector.commit_runs import case_run, question_name
from harness.bisector.commits import CommitSearch, find_first_bad
from harness.bisector.environment import (
    compare,
    of_legs,
    of_nights,
)
from harness.bisector.findings import Findings
from harness.bisector.foreign import commit_run, program_range
from harness.bisector.layer_range import find_layer_range
from harness.bisector.probes import locate_case
from harness.bisector.questions import OutOfBudget
from harness.bisector.releases import find_release
from harness.bisector.repro import FOLDER
from harness.bisector.words import where
from harness.bisector.worktree import Git
from harness.checks.complete import find_flaw
from harness.errors import shown
from harness.program.spec import capabilities_of
from harness.provenance import MACHINE_KINDS, facts
from harness.records import CaseSpec, Verdict
from harness.store import LEGS, MANIFEST_FILE, CaseRuns, RunFolder

SHORT_HASH = 12
COMMITS_FOLDER = "commits"
"""Of the folder of a search: run folders of other commits."""
Until = Literal["environment", "place", "causes", "layers", "least"]


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
        package: name and `A..B`, releases to search for the first bad one; None for none.
        every_run: the fault is known to fire in every run, so a commit is asked once.
        layout_steps: of which the first is searched in which two layouts are apart by more than
            rounding; None to search a case.
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
    package: tuple[str, str] | None = None
    every_run: bool = False
    layout_steps: range | None = None

    @property
    def room(self) -> list[str]:
        """Its room as options of `harness rerun`."""
        given = {
            "--slots": self.slots, "--ranks-per-gpu": self.ranks_per_gpu, "--jobs": self.jobs,
        }  # fmt: skip
        return [word for name, n in given.items() if n is not None for word in (name, str(n))]


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


def _environment(state: State) -> Findings:
    """Said before anything else: bits of other environments prove nothing about the code."""
    told = list(state.findings.environment)
    if state.search.passed is not None:
        told.append(of_nights(state.search.passed, _night(state), state.search.case.id).sentence)
    if _legs_differ(state):
        told.append(of_legs(state.runs.reference, state.runs.candidate).sentence)
    night = _night(state)
    if night is not state.asker.folder:
        here = state.asker.folder
        sides = facts(night.manifest), facts(here.manifest)
        apart = compare("the case", "further runs", *sides, kinds=MACHINE_KINDS)
        if apart.facts:
            told.append(apart.sentence)
    failed, now = str(_night(state).manifest.get("commit", "")), commit.describe()
    if failed != now:
        told.append(f"the case failed as {_code(failed)}; further runs are made as {_code(now)}")
    return replace(state.findings, environment=tuple(told))


def _code(commit_and_rest: str) -> str:
    """A commit and the hash of what lies on top of it, short enough for a line."""
    head, plus, rest = commit_and_rest.partition("+")
    return shown(head[:SHORT_HASH] + plus + rest) if head else "an unknown commit"


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
    # What was recorded by hand cannot be run again to look closer.
    asker = None if state.search.case.reference.recorded else state.asker
    place = locate_case(state.runs, asker, verdict=state.verdict, element=state.search.element)
    return replace(state.findings, place=place)


def _causes(state: State) -> Findings:
    """Which of the differences between the legs make it fail."""
    findings = state.findings
    flaws = map(find_flaw, (state.runs.reference, state.runs.control))
    if _legs_differ(state) or any(flaw is not None for flaw in flaws):
        return findings  # no difference of configurations explains it
    try:
        found = find_causes(state.runs.case, state.verdict, state.asker)
    except OutOfBudget as error:
        best = error.best if isinstance(error.best, FoundCauses) else None
        raise Unfinished(replace(findings, causes=best), str(error)) from None
    return replace(findings, causes=found)


def _layers(state: State) -> Findings:
    """Which layers must be captured for it to fail."""
    findings = state.findings
    if findings.causes is None:
        return findings
    try:
        found = find_layer_range(state.runs.case, state.verdict, findings.causes, state.asker)
    except OutOfBudget as error:
        raise Unfinished(findings, str(error)) from None
    return replace(findings, layers=found)


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


def commits_of(search: Search) -> CommitRange:
    """The range in which the first bad commit is searched for: of the program's own code."""
    if not capabilities_of(search.case.candidate.config).layouts:
        return program_range(search.case, search.commits)
    return CommitRange(Path.cwd(), search.commits, commit.PACKAGES)


def find_commit(state: State) -> Findings:
    """The first commit on which the case fails, in a worktree of its own."""
    search, folder = state.search, state.asker.folder
    journal = state.asker.journal
    if not search.commits or journal is None:
        return state.findings
    if capabilities_of(search.case.candidate.config).layouts:
        run = case_run(
            folder.case_folder(search.case.id), state.verdict, folder.path / COMMITS_FOLDER,
            search.room,
        )  # fmt: skip
    else:
        top, _, _ = resolve_range(commits_of(search))
        run = commit_run(search.case, state.verdict, state.asker, top)
    try:
        found = find_first_bad(
            commits_of(search), run, journal, name=question_name(search.case),
            once=search.every_run, known=_known_rate(state), cost=len(LEGS),
        )  # fmt: skip
    except OutOfBudget as error:
        best = error.best if isinstance(error.best, CommitSearch) else None
        raise Unfinished(replace(state.findings, commits=best), str(error)) from None
    return replace(state.findings, commits=found)


def find_package(state: State) -> Findings:
    """The first release of a package with which the program fails."""
    if state.search.package is None:
        return state.findings
    causes = state.findings.causes
    found = find_release(
        state.runs.case, state.verdict, *state.search.package, state.asker,
        patience=causes.patience if causes is not None else None,
    )  # fmt: skip
    return replace(state.findings, release=found)


def _known_rate(state: State) -> Patience | None:
    """How often the case fails as the code is here, if that is the bad commit's."""
    causes = state.findings.causes
    _, _, bad = resolve_range(commits_of(state.search))
    if capabilities_of(state.search.case.candidate.config).layouts:
        here = commit.describe()
    else:
        git = Git(commits_of(state.search).root)
        here = "" if git("status", "--porcelain", "-uno") else git("rev-parse", "HEAD")
    return causes.patience if causes is not None and bad == here else None


STAGES: dict[Until, Stage] = {
    "environment": _environment, "place": _place, "causes": _causes,
    "layers": _layers, "least": _least,
}  # fmt: skip
"""In this order; each may rest on those before it."""


class Unfinished(Exception):
    """A stage ended before its end; `findings` has what it knows."""

    def __init__(self, findings: Findings, why: str) -> None:
        super().__init__(why)
        self.findings = findings
