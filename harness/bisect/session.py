"""A search: what is asked, its folder, its engine, its stages, and what it keeps after each.

    environment -> place -> causes -> layers -> least case -> commits -> releases

A stage takes what is known and gives what is known after it. Findings and page are written after
every stage, and when somebody stops the search: what was found stays, and the same command goes on.
Runs are in the folder, by key: a search that is started again, killed or not, finds them there.
"""

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from harness import commit
from harness.bisect.causes import FoundCauses, find_causes
from harness.bisect.chance import Patience
from harness.bisect.commit_runs import case_run, commit_run, program_range
from harness.bisect.commits import (
    OF_COMMITS,
    CommitRange,
    CommitSearch,
    Git,
    find_first_bad,
    find_release,
    published,
    resolve_range,
)
from harness.bisect.environment import compare, of_legs, of_nights
from harness.bisect.experiments import AskedQuestion, Asker, Budget, OutOfBudget, Questions
from harness.bisect.layouts import Compared, first_apart
from harness.bisect.least import find_layer_range
from harness.bisect.probes import locate_case
from harness.bisect.render import Findings, SearchView, keep_findings, keep_page, read_findings
from harness.bisect.repro import FOLDER, leave_alone
from harness.checks.complete import find_flaw
from harness.errors import Interrupted, UsageError, shown
from harness.program.launch import make_environments
from harness.program.spec import capabilities_of, program_of
from harness.provenance import MACHINE_KINDS, changes, everything, facts
from harness.records import CaseSpec, Verdict
from harness.repeats import runs_of
from harness.runner import launch
from harness.runner.retries import clear_leftovers
from harness.runner.run import stop_on_signals
from harness.scenario.case_id import whole_id
from harness.store import LEGS, MANIFEST_FILE, CaseRuns, RunFolder
from harness.store.find import DEFAULT_OUT
from harness.terminal import typed

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
        folder=state.search.repro, place=str(findings.place or ""),
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
    if not search.commits:
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
            commits_of(search), run, state.asker.questions,
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


MAX_NAME_CHARS = 120
REPLIES = "replies"
"""Of the folder of a search: what is answered by none of its runs."""
MOST_TOLD = 3
NO_ANSWER = "no answer yet"
_OF_STAGES = ("place", "causes", "layers", "least_case", "commits", "release")


def bisect(search: Search, view: SearchView) -> tuple[Findings, Path]:
    """Search, as far as the budget goes; what was found, and the folder that holds it.

    Raises:
        UsageError: the folder is of something else, or the machine cannot run the case.
        Interrupted: somebody stopped it; what was found is kept.
        Infrastructure: the disk or the engine failed.
    """
    if search.case.reference.recorded and (search.commits or search.package):
        raise UsageError(
            "bisect: expected a case that can be run for --commits and --package, its runs were "
            "recorded by hand"
        )
    if search.commits:
        resolve_range(commits_of(search))  # a slip of the pen should not cost an hour first
    if search.package is not None:
        if capabilities_of(search.case.candidate.config).layouts:
            raise UsageError("--package: expected a scenario with a program, got the built-in one")
        published(*search.package)
    prepared = launch.prepare_cases(
        [search.case], name=f"bisect-{search.case.scenario}",
        why=f"Where the failure of {search.case.id} comes from.",
        slots=search.slots, ranks_per_gpu=search.ranks_per_gpu, jobs=search.jobs,
    )  # fmt: skip
    programs = [program_of(spec.config) for spec in runs_of(search.case)]
    make_environments(filter(None, programs), lambda _: None)
    budget = Budget(runs=search.budget_runs, minutes=search.budget_minutes)
    folder, notes = _folder(search, prepared)
    with folder, view:
        clear_leftovers(folder)
        before = read_findings(folder.path)
        questions = Questions(
            budget, replies=folder.path / REPLIES, told=view.answered,
            earlier=() if before is None else before.questions,
        )  # fmt: skip
        engine = launch.make_engine(prepared)
        try:
            asker = Asker(folder, engine, questions, progress=view)
            return _Sitting(search, asker, before, notes).carry_out(), folder.path
        finally:
            engine.close()


class _Sitting:
    """Stages over one folder, what is known kept after each, and however it ends."""

    def __init__(
        self, search: Search, asker: Asker, before: Findings | None, notes: Sequence[str]
    ) -> None:
        self._search, self._asker = search, asker
        self._folder, self._began_s = asker.folder.path, time.monotonic()
        self._before = before
        self._has_verdict = False
        case = search.case
        self._found = Findings(
            case_id=case.id, scenario=case.scenario, outcome="error", what="not_run",
            message=NO_ANSWER, command=_again(search, self._folder),
            environment=tuple(notes),
        )  # fmt: skip

    def carry_out(self) -> Findings:
        """All stages, or as many as the budget allows.

        Raises:
            Interrupted: somebody stopped it; the text has the command that goes on.
        """
        if self._before is None:
            self._keep(self._found)  # says that the folder is of a search
        try:
            with stop_on_signals():
                for found in self._stages():
                    self._keep(found)
            return self._found
        except Unfinished as ended:
            return self._stop(ended.findings, str(ended))
        except OutOfBudget as error:
            return self._stop(self._found, str(error))
        except (Interrupted, KeyboardInterrupt):
            self._stop(self._found, "interrupted")
            raise Interrupted(
                f"interrupted; what was found is in {self._folder}, go on with: "
                f"{typed(self._found.command)}"
            ) from None

    def _stages(self) -> Iterator[Findings]:
        """What is known, each time that more is."""
        search, asker = self._search, self._asker
        if search.place is not None:
            asker.adopt(search.place, search.case)
        if search.layout_steps is not None:
            yield self._between_layouts(search.layout_steps)
            return
        asked = asker.ask(search.case, "does the case itself fail?")
        yield self._judged(asked.verdict)
        if asked.verdict.outcome in ("passed", "skipped"):
            return
        if asked.verdict.what == "shared_gpu":
            raise Unfinished(self._found, "nobody knows whether the case fails by itself")
        state = State(
            search=search, asker=asker, runs=asked.runs, verdict=asked.verdict,
            findings=self._found, before=self._before,
        )  # fmt: skip
        names = list(STAGES)
        last = "place" if search.case.reference.recorded else search.until
        names = names[: names.index(last) + 1]
        for stage in (*(STAGES[name] for name in names), find_commit, find_package):
            state = replace(state, findings=stage(state))
            yield state.findings

    def _between_layouts(self, steps: range) -> Findings:
        """No two layouts are bitwise equal: what is apart by more than rounding."""

        def found(compared: Compared) -> Findings:
            return replace(self._judged(compared.verdict), place=compared.answer.location)

        def keep(compared: Compared) -> None:
            self._keep(found(compared))

        return found(first_apart(self._search.case, steps, self._asker, seen=keep))

    def _judged(self, verdict: Verdict) -> Findings:
        self._has_verdict = True
        return replace(
            self._found, outcome=verdict.outcome, what=verdict.what, message=verdict.message
        )

    def _stop(self, found: Findings, why: str) -> Findings:
        """Keep what is known; of stages not come to in this sitting, what the last one knew."""
        if (before := self._before) is not None:
            asked = found if self._has_verdict else before
            found = replace(
                found, outcome=asked.outcome, what=asked.what, message=asked.message,
                **{name: getattr(found, name) or getattr(before, name) for name in _OF_STAGES},
            )  # fmt: skip
        return self._keep(replace(found, stopped=why), *self._asker.questions.left)

    def _keep(self, found: Findings, *questions: AskedQuestion) -> Findings:
        spent_s = self._before.seconds if self._before is not None else 0.0
        asker, seconds = self._asker, spent_s + time.monotonic() - self._began_s
        of_commits = len(list(self._folder.glob(f"{REPLIES}/{OF_COMMITS}*.json")))
        if not capabilities_of(self._search.case.candidate.config).layouts:
            of_commits = 0  # their runs are in the folder
        # A kill loses what was paid: the folder has all.
        self._found = replace(
            found, questions=(*asker.questions.asked, *questions),
            num_runs=asker.num_made + len(LEGS) * of_commits, seconds=round(seconds, 3),
        )  # fmt: skip
        keep_findings(self._folder, self._found)
        keep_page(self._folder, self._found)
        return self._found


def _folder(search: Search, prepared: launch.Prepared) -> tuple[RunFolder, tuple[str, ...]]:
    """The folder of this search, one that is there if its runs hold; which ones do not, and why.

    Raises:
        UsageError: the folder that was named is of something else.
    """
    name = f"bisect-{whole_id(search.case.scenario, search.case.id)}"
    first = search.out or DEFAULT_OUT / name[:MAX_NAME_CHARS]
    now = _holds_for(launch.provenance_of(prepared.machine, [search.case]))
    number, wanted, notes = 1, first, list[str]()
    while (wanted / MANIFEST_FILE).is_file():
        folder = RunFolder.open(wanted)
        is_same = bool(folder.cases) and same_question(folder.cases[0], search.case)
        why = changes(_holds_for(folder.manifest), now, MOST_TOLD) if is_same else ""
        if search.out is not None and (why or not is_same):
            said = f"answers that hold here and now, but {why}" if why else (
                f"a search of {search.case.id} or nothing, got a run folder of something else"
            )  # fmt: skip
            raise UsageError(f"--out {wanted}: expected {said}: name another folder")
        if is_same and not why:
            return folder, tuple(notes)
        if is_same:
            notes.append(f"answers of an earlier search, in {wanted}, are left alone: {why}")
        number += 1
        wanted = first.with_name(f"{first.name}-{number}")
    return launch.make_folder(prepared, wanted, search.argv), tuple(notes)


def _holds_for(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What the runs of a folder hold for: code and whatever else decides bits."""
    return {"code": str(manifest.get("code")), **everything(manifest)}


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
