"""Asks questions by making runs: a question is a case, made in the search's own run folder.

    case -> what its runs cost -> journal, if there is one -> run.execute -> records of three legs

Runs that the folder holds are not made again, so a search that goes on pays only for what is left.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.bisector.questions import Budget, Journal, OutOfBudget, Question, Reply
from harness.checks import judge as judge_case
from harness.checks.complete import find_flaw
from harness.engine.base import Engine
from harness.errors import Infrastructure
from harness.records import CaseSpec, RunResult, Verdict, What
from harness.repeats import runs_of
from harness.run import Judge, Progress, Silent, execute
from harness.store import LEGS, OUTCOME_FILE, CaseRuns, RunFolder
from harness.store.files import link_or_copy

COVERS = "covers"
"""In the detail of a reply: words of the questions whose runs were made for it."""


def brief(verdict: Verdict) -> str:
    """An answer in two words: `failed diverged`."""
    return f"{verdict.outcome} {verdict.what}".strip()


def message(verdict: Verdict) -> str:
    """An answer of a question that is not about passing or failing: what was seen."""
    return verdict.message


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What came of a question: the case with the records of its runs, and the verdict."""

    runs: CaseRuns
    verdict: Verdict


class Asker:
    """Makes the runs of questions in one folder, within a budget.

    Args:
        folder: of the search; locked by whoever made it.
        engine: makes the runs; stays open.
        budget: of this sitting; None for the journal's, or any.
        journal: keeps the questions; None to keep only their runs.
        progress: is told of every run.
    """

    def __init__(
        self,
        folder: RunFolder,
        engine: Engine,
        *,
        budget: Budget | None = None,
        journal: Journal | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.folder = folder
        self.journal = journal
        self.budget = budget or (journal.budget if journal is not None else Budget())
        self.num_runs = 0
        self._adopted: set[str] = set()
        self._engine = engine
        self._progress = progress or Silent()

    def cost(self, case: CaseSpec) -> int:
        """How many runs the question would make."""
        keys = {spec.key for spec in runs_of(case)}
        return sum(self.folder.finished(key) is None for key in keys)

    def ask(
        self,
        case: CaseSpec,
        words: str,
        *,
        judge: Judge = judge_case,
        key: str = "",
        answer: Callable[[Verdict], str] = brief,
    ) -> Asked:
        """Make the runs of a case that are missing, and judge it.

        Args:
            case: the question; its id becomes a folder's name.
            words: the question for people.
            judge: from a case and its three runs to a verdict.
            key: of the question in the journal; "" for the keys of its runs.
            answer: for people, from the verdict.

        Raises:
            OutOfBudget: it costs more than is left; nothing was run.
            UsageError: a run does not fit on the engine.
            Interrupted: somebody stopped it; what is done is kept.
        """
        found: list[Verdict] = []

        def find_out() -> Reply:
            cost = self.cost(case)
            (verdict,) = execute(
                self.folder, [case], self._engine, self._progress, judge=judge, confirm=False
            )
            self.num_runs += cost
            found.append(verdict)
            return Reply(words=answer(verdict), runs=cost)

        question = Question(key=key or question_key(case), words=words, runs=self.cost(case))
        if self.journal is not None:
            self.journal.ask(question, find_out)
        if not found:
            # Without a journal, or known: what is missing is made, what is there costs nothing.
            self.budget.check(self.cost(case))
            self.budget.spend(find_out().runs)
        return Asked(runs=load_runs(self.folder, case), verdict=found[0])

    def without_journal(self) -> "Asker":
        """For runs that somebody else accounts for, in the same folder and on the same engine."""
        return Asker(self.folder, self._engine, budget=Budget(), progress=self._progress)

    @property
    def num_made(self) -> int:
        """Runs that the folder holds and that were made here, in whatever sitting."""
        made = {path.parent.name for path in self.folder.path.glob(f"runs/*/{OUTCOME_FILE}")}
        return len(made - self._adopted)

    def room(self, case: CaseSpec) -> int:
        """How many candidates of a case fit on the engine side by side."""
        return max(1, self._engine.slots // case.candidate.world_size)

    def make_ahead(self, cases: Sequence[CaseSpec], words: Sequence[str]) -> None:
        """Make the runs of several questions side by side, to be asked one by one afterwards.

        Nothing is made if the budget does not allow them all.

        Args:
            cases: the questions.
            words: of each, for people.

        Raises:
            UsageError: a run does not fit on the engine.
            Interrupted: somebody stopped it; what is done is kept.
        """
        specs = {spec.key for case in cases for spec in runs_of(case)}
        cost = sum(self.folder.finished(key) is None for key in specs)
        try:
            self.budget.check(cost)
        except OutOfBudget:
            return
        if not cost:
            return

        def find_out() -> Reply:
            verdicts = execute(self.folder, cases, self._engine, self._progress, confirm=False)
            self.num_runs += cost
            told = Counter(brief(verdict) for verdict in verdicts)
            answers = ", ".join(f"{answer} ({number} times)" if number > 1 else answer
                                for answer, number in told.items())  # fmt: skip
            return Reply(words=answers, runs=cost, detail={COVERS: list(words)})

        together = f"{words[0]} with the next {len(words) - 1} beside it"
        key = " and ".join(question_key(case) for case in cases)
        question = Question(key=f"ahead {key}", words=together, runs=cost)
        if self.journal is not None and self.journal.known(question.key) is None:
            self.journal.ask(question, find_out)
        else:
            self.budget.spend(find_out().runs)

    def adopt(self, place: Path, case: CaseSpec) -> None:
        """Take the finished runs of a case folder, so that they are not made again.

        Raises:
            Infrastructure: the disk refused.
        """
        for leg in LEGS:
            target = self.folder.run_folder(getattr(case, leg).key)
            source = place / leg
            if not (source / OUTCOME_FILE).is_file():
                continue
            self._adopted.add(target.name)
            if target.exists():
                continue
            building = target.with_name(f".{target.name}.tmp")
            try:
                shutil.rmtree(building, ignore_errors=True)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copytree(source, building, symlinks=True, copy_function=link_or_copy)
                building.rename(target)
            except (OSError, shutil.Error) as error:
                raise Infrastructure(f"cannot take over {source}: {error}") from error


def question_key(case: CaseSpec) -> str:
    """The same for the same question: which legs, and what is asked of them."""
    checks = ",".join(sorted(case.checks))
    return f"{case.reference.key} {case.control.key} {case.candidate.key} {checks}"


def load_runs(folder: RunFolder, case: CaseSpec) -> CaseRuns:
    """A case with the records of its runs, as the folder has them."""
    legs: dict[str, Any] = {leg: folder.load_run(getattr(case, leg)) for leg in LEGS}
    return CaseRuns(case=case, **legs)


def judged_by(
    differ: Callable[[RunResult, RunResult], str],
) -> Judge:
    """A judge for questions whose control is the reference itself: it only says what was seen.

    Args:
        differ: what to say of reference and candidate; "" if there is nothing.
    """

    def judge(
        case: CaseSpec, reference: RunResult, control: RunResult, candidate: RunResult, **_: Any
    ) -> Verdict:
        told = differ(reference, candidate)
        flaw, leg = find_flaw(reference), "reference"
        what: What = candidate.outcome.what or "diverged"
        if candidate.outcome.undecided or what == "shared_gpu":
            flaw, leg = find_flaw(candidate), "candidate"
        if flaw is not None:
            told, what = f"the {leg}: {flaw.message}", flaw.what
        return Verdict(
            case_id=case.id,
            outcome="error" if flaw is not None else "failed" if told else "passed",
            what=what if told else "",
            message=told or "the legs are equal: what failed did not come back",
            checks=(),
            runs={leg: getattr(case, leg).key for leg in LEGS},
            wall_s=0.0,
        )

    return judge
