"""One sitting of a search: its folder, its engine, its stages, and what it keeps after each.

    environment -> place -> causes -> least case -> commits

A stage takes what is known and gives what is known after it. Findings and page are written after
every stage, and when somebody stops the search: what was found stays, and the same command goes on.
"""

import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from harness import launch
from harness.bisector.asking import Asker
from harness.bisector.commit_answers import OF_COMMITS
from harness.bisector.commit_range import resolve_range
from harness.bisector.findings import AskedQuestion, Findings, keep_findings, read_findings
from harness.bisector.page import keep_page
from harness.bisector.questions import (
    Budget,
    Identity,
    Journal,
    OtherSchema,
    OutOfBudget,
    identity_of,
    read_journal,
)
from harness.bisector.releases import published
from harness.bisector.stages import (
    STAGES,
    Search,
    State,
    Unfinished,
    commits_of,
    find_commit,
    find_package,
)
from harness.bisector.telling import SearchView, tell, told_of
from harness.bisector.two_cells import Compared, first_apart
from harness.errors import Interrupted, UsageError
from harness.leftovers import clear_leftovers
from harness.program.launch import make_environments
from harness.program.spec import capabilities_of, program_of
from harness.records import CaseSpec, Verdict
from harness.repeats import runs_of
from harness.run import stop_on_signals
from harness.scenario.case_id import whole_id
from harness.store import JOURNAL_FILE, MANIFEST_FILE, RunFolder
from harness.store.find import DEFAULT_OUT
from harness.typed import typed

MAX_NAME_CHARS = 120
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
    identity = identity_of(search.case, prepared.machine)
    folder, notes = _folder(search, prepared, identity)
    path, told = folder.path / JOURNAL_FILE, partial(tell, view)
    with folder, view, Journal(path, identity, budget, told=told) as journal:
        clear_leftovers(folder)
        engine = launch.make_engine(prepared)
        try:
            asker = Asker(folder, engine, journal=journal, progress=view)
            return _Sitting(search, asker, notes).carry_out(), folder.path
        finally:
            engine.close()


class _Sitting:
    """Stages over one folder, what is known kept after each, and however it ends."""

    def __init__(self, search: Search, asker: Asker, notes: Sequence[str]) -> None:
        self._search, self._asker = search, asker
        self._folder, self._began_s = asker.folder.path, time.monotonic()
        self._before = read_findings(self._folder)
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
        return self._keep(replace(found, stopped=why))

    def _keep(self, found: Findings) -> Findings:
        spent_s = self._before.seconds if self._before is not None else 0.0
        self._found = _with_questions(
            found, self._asker, spent_s + time.monotonic() - self._began_s
        )
        keep_findings(self._folder, self._found)
        keep_page(self._folder, self._found)
        return self._found


def _with_questions(findings: Findings, asker: Asker, seconds: float) -> Findings:
    entries = asker.journal.entries if asker.journal is not None else ()
    asked = tuple(
        AskedQuestion(words=q.words, answer=r.words, runs=r.runs, seconds=r.seconds)
        for q, r in told_of(entries)
    )
    # A kill loses what was paid: the folder has all.
    elsewhere = capabilities_of(asker.folder.cases[0].candidate.config).layouts
    of_commits = sum(r.runs for q, r in entries if elsewhere and q.key.startswith(OF_COMMITS))
    runs = asker.num_made + of_commits
    return replace(findings, questions=asked, num_runs=runs, seconds=round(seconds, 3))


def _folder(
    search: Search, prepared: launch.Prepared, identity: Identity
) -> tuple[RunFolder, tuple[str, ...]]:
    """The folder of this search, one that is there if its answers hold; which ones do not, and why.

    Raises:
        UsageError: the folder that was named is of something else.
    """
    name = f"bisect-{whole_id(search.case.scenario, search.case.id)}"
    first = search.out or DEFAULT_OUT / name[:MAX_NAME_CHARS]
    number, wanted, notes = 1, first, list[str]()
    while (wanted / MANIFEST_FILE).is_file():
        folder = RunFolder.open(wanted)
        is_same = bool(folder.cases) and same_question(folder.cases[0], search.case)
        if is_same and search.out is not None:
            return folder, ()  # its journal is refused if it is another's
        if search.out is not None:
            raise UsageError(
                f"--out {wanted}: expected a search of {search.case.id} or nothing, got a run "
                "folder of something else"
            )
        if is_same and not (why := _why_other(folder, identity)):
            return folder, tuple(notes)
        if is_same:
            notes.append(f"answers of an earlier search, in {wanted}, are left alone: {why}")
        number += 1
        wanted = first.with_name(f"{first.name}-{number}")
    return launch.make_folder(prepared, wanted, search.argv), tuple(notes)


def _why_other(folder: RunFolder, identity: Identity) -> str:
    """Why the answers in a folder do not hold here and now; "" if they do."""
    journal = folder.path / JOURNAL_FILE
    if not journal.is_file():
        return ""
    try:
        return read_journal(journal)[0].differs_from(identity)
    except OtherSchema as error:
        return str(error)


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
