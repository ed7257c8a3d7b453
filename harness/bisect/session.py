"""A search: what is asked, its folder, its engine, its stages, and what it keeps after each.

    environment -> place -> causes -> least case -> commits -> releases
                         -> hardware, where that is asked: nothing after it

Findings and page are written after every stage, and however the search ends; the same command goes
on, as its runs are in the folder, by key.
"""

import itertools
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import provenance
from harness.bisect import commits as halving
from harness.bisect.causes import FoundCauses, find_causes
from harness.bisect.differences import between_environments
from harness.bisect.experiments import Asked, Asker, Questions, made_anew, runs_key
from harness.bisect.hardware import follow
from harness.bisect.layouts import LayoutAnswer, first_apart, verdict_of
from harness.bisect.locate import locate_case
from harness.bisect.render import (
    Findings,
    SearchView,
    keep_findings,
    read_findings,
    search_name,
)
from harness.bisect.repro import FOLDER, MinimalCase, write_minimal_case
from harness.checks.complete import find_flaw
from harness.engine.slurm import stored_options
from harness.errors import Interrupted, UsageError, shown
from harness.program.spec import (
    commit_of_configs,
    folder_of,
    make_environments,
    program_of,
)
from harness.provenance import changes, everything
from harness.records import CaseSpec, Verdict
from harness.repeats import runs_of
from harness.runner import launch
from harness.runner.run import clear_leftovers, stop_on_signals
from harness.store import LEGS, MANIFEST_FILE, RunFolder
from harness.store.folder import DEFAULT_OUT
from harness.terminal import typed

SHORT_HASH, MOST_TOLD = 12, 3
COMMITS_FOLDER, REPLIES = "commits", "replies"
"""Of the folder of a search: run folders of other commits; what is answered by none of its runs."""
STAGES = ("environment", "place", "causes", "least")
_KEPT = ("place", "hardware", "causes", "least_case", "commits", "release")


@dataclass(frozen=True, kw_only=True)
class Search:
    """A case, the folder with its runs if they were made, and the options of `harness bisect`.

    With `two_layouts`, what is apart by more than rounding is searched for.
    """

    case: CaseSpec
    place: Path | None
    out: Path | None = None
    argv: Sequence[str] = ()
    room: Mapping[str, int | None] = field(default_factory=dict)
    element: bool = True
    until: str = "least"
    repro: Path = FOLDER
    commits: str = ""
    package: tuple[str, str] | None = None
    every_run: bool = False
    two_layouts: bool = False
    hardware: bool = False

    def history(self) -> halving.History:
        if self.case.candidate.is_builtin:
            return halving.commits_of(Path.cwd(), self.commits, provenance.PACKAGES)
        (program,) = filter(None, [program_of(self.case.candidate.config)])
        return halving.commits_of(folder_of(program), self.commits)


def bisect(search: Search, view: SearchView) -> tuple[Findings, Path]:
    """Search; what was found, and the folder that holds it.

    `UsageError` if the folder is of something else, or the machine cannot run the case.
    """
    case = search.case
    if case.reference.recorded and (search.commits or search.package):
        raise UsageError(
            "bisect: expected a case that can be run for --commits and --package, its runs were "
            "recorded by hand"
        )
    if search.hardware:
        _refuse_elsewhere(search)
    if search.commits:
        search.history()  # a mistyped range should not cost an hour first
    if search.package is not None:
        if search.case.candidate.is_builtin:
            raise UsageError("--package: expected a scenario with a program, got the built-in one")
        halving.published(*search.package)
    name, why = f"bisect-{case.scenario}", f"Where the failure of {case.id} comes from."
    prepared = launch.prepare_cases([case], name=name, why=why, **search.room)
    programs = filter(None, (program_of(spec.config) for spec in runs_of(case)))
    make_environments(programs, _say)
    folder, notes = _folder(search, prepared)
    with folder, view:
        clear_leftovers(folder)
        before = read_findings(folder.path)
        questions = Questions(folder.path / REPLIES, view.answered)
        engine = launch.make_engine(prepared)
        try:
            asker = Asker(folder, engine, questions, progress=view)
            stages = _Stages(search, asker, before, notes, prepared.devices)
            return stages.carry_out(), folder.path
        finally:
            engine.close()


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _refuse_elsewhere(search: Search) -> None:
    """See that it is this machine's hardware that is asked about."""
    if search.commits or search.package or search.two_layouts:
        raise UsageError("--hardware: expected no --commits, --package and --against with it")
    if search.case.reference.recorded:
        raise UsageError("--hardware: expected a case that can be run, its runs were recorded")
    run = _run_of(search.place)
    if run is not None and stored_options(run.manifest) is not None:
        raise UsageError(
            "--hardware: expected a case of this machine, its runs were made by Slurm: run the "
            "scenario on a node that is suspected, with --engine local"
        )


def _run_of(place: Path | None) -> RunFolder | None:
    found = place is not None and (place.parent.parent / MANIFEST_FILE).is_file()
    return RunFolder.open(place.parent.parent) if place is not None and found else None


class _Stages:
    """Stages over one folder, what is known kept after each, and however it ends."""

    _asked: Asked
    _here: CaseSpec
    _is_elsewhere: bool

    def __init__(
        self, search: Search, asker: Asker, before: Findings | None, notes: Sequence[str],
        gpus: Sequence[str],
    ) -> None:  # fmt: skip
        self._gpus = gpus
        self._search, self._case, self._asker, self._before = search, search.case, asker, before
        self._folder, self._began_s, self._has_verdict = asker.folder.path, time.monotonic(), False
        words = [word for word in search.argv if word != "--json"]
        if "--out" not in words:
            words += ["--out", os.path.relpath(self._folder)]
        self._found = Findings(
            case_id=self._case.id, scenario=self._case.scenario, outcome="error", what="not_run",
            message="no answer yet", runs=runs_key(self._case), command=shlex.join(words),
            environment=tuple(notes),
        )  # fmt: skip

    def carry_out(self) -> Findings:
        if self._before is None:
            self._keep()  # says that the folder is of a search
        try:
            with stop_on_signals():
                self._stages()
        except (Interrupted, KeyboardInterrupt):
            self._stop("interrupted")
            raise Interrupted(
                f"interrupted; what was found is in {self._folder}, go on with: "
                f"{typed(self._found.command)}"
            ) from None
        return self._found

    def _stages(self) -> None:
        search, asker = self._search, self._asker
        if search.place is not None:
            asker.adopt(search.place, self._case)
        if search.two_layouts:
            self._between(first_apart(self._case, asker, self._between))
            return
        self._asked = asker.ask(self._case, "does the case itself fail?")
        verdict = self._asked.verdict
        self._judged(verdict)
        if verdict.outcome in ("passed", "skipped"):
            return
        if verdict.what == "shared_gpu":
            self._stop("it failed while it shared a GPU with other runs: the cause is unknown")
            return
        stages = {
            "environment": self._environment, "place": self._place, "causes": self._causes,
            "least_case": self._least,
        }  # fmt: skip
        last = "place" if self._case.reference.recorded or search.hardware else search.until
        if self._case.expect != "bitwise":
            last = "environment"  # bits that may differ have no place
        for name, stage in list(stages.items())[: STAGES.index(last) + 1]:
            self._keep(**{name: stage()})
        if search.hardware:
            cores = os.sched_getaffinity(0)
            self._keep(hardware=follow(self._asked.runs, asker, self._gpus, cores))
        if search.commits:
            self._keep(commits=self._commit())
        if search.package is not None:
            asked = self._case, verdict, *search.package, asker
            self._keep(release=halving.find_release(*asked, every_run=search.every_run))

    def _between(self, answer: LayoutAnswer) -> None:
        self._judged(verdict_of(self._case, answer), place=answer.location)

    def _judged(self, verdict: Verdict, **more: Any) -> None:
        self._has_verdict = True
        self._keep(outcome=verdict.outcome, what=verdict.what, message=verdict.message, **more)

    # --- stages

    def _environment(self) -> tuple[str, ...]:
        """Said before anything else: bits of other environments prove nothing about the code."""
        here = self._asker.folder
        run = _run_of(self._search.place) or here
        runs, other = self._asked.runs, "ran in other environments:"
        told = list(self._found.environment)
        if legs := between_environments(runs.reference, runs.candidate):
            told.append(f"the reference and the candidate {other} {'; '.join(legs[:MOST_TOLD])}")
        was, is_now = everything(run.manifest, like=here.manifest), everything(here.manifest)
        self._is_elsewhere = (run.manifest.get("code"), was) != (here.manifest.get("code"), is_now)
        if apart := changes(was, is_now, MOST_TOLD):
            told.append(f"the case and further runs {other} {apart}")
        configs = [spec.config for spec in (runs.reference.spec, runs.candidate.spec)]
        failed, now = str(run.manifest.get("commit", "")), commit_of_configs(configs)
        if now not in failed.split(", "):
            failed, now = _code(failed), _code(now)
            told.append(f"the case failed as {failed}; further runs are made as {now}")
        return tuple(told)

    def _place(self) -> Any:
        # What was recorded by hand cannot be run again to look closer; trials look themselves.
        only_records = self._case.reference.recorded or self._search.hardware
        asker = None if only_records else self._asker
        asked, element = self._asked, self._search.element
        return locate_case(asked.runs, asker, verdict=asked.verdict, element=element)

    def _causes(self) -> FoundCauses | None:
        """Which of the differences of the configurations make it fail; None if none explains it."""
        runs, verdict = self._asked.runs, self._asked.verdict
        if between_environments(runs.reference, runs.candidate):
            return None  # no configuration is to blame
        if find_flaw(runs.reference) is not None or find_flaw(runs.control) is not None:
            return None
        self._here = runs.case
        if self._is_elsewhere:  # runs of two environments cannot be compared
            self._here, words = made_anew(runs.case), "does the case fail as it is run now?"
            verdict = self._asker.ask(self._here, words).verdict
        return find_causes(self._here, verdict, self._asker)

    def _least(self) -> MinimalCase | None:
        """A scenario that fails alone, in the least ranks, layers and steps."""
        if self._found.causes is None or not self._found.causes.causes:
            return None
        kept = self._before.least_case if self._before is not None else None
        if kept is not None and kept.path and Path(kept.path).is_file():
            return kept  # written by an earlier call
        return write_minimal_case(
            self._here, self._found.causes, self._asker, folder=self._search.repro,
            place=str(self._found.place or ""),
        )  # fmt: skip

    def _commit(self) -> halving.CommitSearch:
        """The first commit on which the case fails, or passes, in a worktree of its own."""
        search, folder, verdict = self._search, self._asker.folder, self._asked.verdict
        history = search.history()
        if search.case.candidate.is_builtin:
            given = {f"--{k.replace('_', '-')}": n for k, n in search.room.items() if n is not None}
            room = [word for option, n in given.items() for word in (option, str(n))]
            place = folder.case_folder(self._case.id)
            run = halving.case_run(place, verdict, folder.path / COMMITS_FOLDER, room)
        else:
            run = halving.commit_run(self._case, verdict, self._asker, history.root)
        place, questions = folder.path / halving.WORKTREE, self._asker.questions
        how = {"every_run": search.every_run}
        return halving.turning_commit(history, run, questions, place, **how)

    # --- what is kept

    def _stop(self, why: str) -> None:
        """Keep what is known; of stages not reached this time, what was known before."""
        known, before = dict[str, Any](), self._before
        if before is not None:
            said = self._found if self._has_verdict else before
            known = {name: getattr(said, name) for name in ("outcome", "what", "message")}
            known |= {n: getattr(self._found, n) or getattr(before, n) for n in _KEPT}
        self._keep(stopped=why, **known)

    def _keep(self, **known: Any) -> None:
        spent_s = self._before.seconds if self._before is not None else 0.0
        asker, seconds = self._asker, spent_s + time.monotonic() - self._began_s
        # Of a program, runs of commits are in the folder.
        pattern = f"{REPLIES}/{halving.OF_COMMITS}*.json"
        replies = self._folder.glob(pattern) if self._case.candidate.is_builtin else ()
        self._found = replace(
            self._found, questions=asker.questions.asked,
            num_runs=asker.num_made + len(LEGS) * len(list(replies)), seconds=round(seconds, 3),
            **known,
        )  # fmt: skip
        keep_findings(self._folder, self._found)


def _code(commit_and_rest: str) -> str:
    """A commit and the hash of what lies on top of it, short enough for a line."""
    head, plus, rest = commit_and_rest.partition("+")
    return shown(head[:SHORT_HASH] + plus + rest) if head else "an unknown commit"


def _folder(search: Search, prepared: launch.Prepared) -> tuple[RunFolder, tuple[str, ...]]:
    """The folder of this search, one that is there if its runs hold; which ones do not, and why.

    `UsageError` if the folder that was named is of something else.
    """
    case, notes = search.case, list[str]()
    name = search_name(case)
    now = _holds_for(launch.provenance_of(prepared.machine, [case]))
    for number in itertools.count(1):
        wanted = search.out or DEFAULT_OUT / (f"{name}-{number}" if number > 1 else name)
        if not (wanted / MANIFEST_FILE).is_file():
            return launch.make_folder(prepared, wanted, search.argv), tuple(notes)
        folder = RunFolder.open(wanted)
        is_same = [(runs_key(c), c.checks) for c in folder.cases] == [(runs_key(case), case.checks)]
        why = changes(_holds_for(folder.manifest), now, MOST_TOLD)
        if is_same and not why:
            return folder, tuple(notes)
        if search.out is not None:
            said = f"answers that hold here and now, but {why}" if is_same else (
                f"a search of {case.id} or nothing, got a run folder of something else"
            )  # fmt: skip
            raise UsageError(f"--out {wanted}: expected {said}: name another folder")
        if is_same:
            notes.append(f"answers of an earlier search, in {wanted}, are left alone: {why}")
    raise AssertionError  # numbers do not end


def _holds_for(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What the runs of a folder hold for: code and whatever else decides bits."""
    return {"code": str(manifest.get("code")), **everything(manifest)}
