"""Questions that cost runs: what they may cost, who makes the runs, what the answers are.

    case -> what its runs cost -> run.execute in the search's own run folder -> records, verdict
    verdict -> failure -> fails, passes, unresolved, each as often as `chance` asks for

The folder is the cache: its runs, by `RunSpec.key`, are not made again, so a search that is started
again asks everything anew and pays only for what is left. What is answered by no run of the folder
(another commit's harness, a script) leaves its reply in a file (`Questions.pay`).

A case fails the same way if its outcome and its `what` are those of the failure, in whatever step
and tensor. One that fails in another way, or has no verdict, is `unresolved`: it is kept, and said.
Repeats of a case are its candidate with another replica number, so each is a run of its own that
shares reference and control with all the others.
"""

import dataclasses
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from harness.bisect import chance
from harness.bisect.chance import FAILS, PASSES, UNRESOLVED, Answer
from harness.checks import judge as judge_case
from harness.checks.complete import find_flaw
from harness.codec import Json, RecordError, dumps
from harness.engine.base import Engine
from harness.errors import HarnessError, Infrastructure, UsageError
from harness.records import CaseSpec, ExitCode, Outcome, RunResult, RunSpec, Verdict, What
from harness.repeats import FIRST_REPEAT, runs_of
from harness.runner.run import Judge, Progress, Silent, execute
from harness.store import LEGS, OUTCOME_FILE, CaseRuns, RunFolder
from harness.store.files import link_or_copy, make_folder, read_object, with_checksum, write_atomic

TIMED: tuple[What, ...] = ("throughput_regression", "noisy")
NONDETERMINISTIC: What = "nondeterministic_reference"


class OutOfBudget(HarnessError):
    """The next question costs more than is left.

    Attributes:
        best: what the search knows so far; whoever catches it on the way up may set it.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.NO_VERDICT

    def __init__(self, text: str, best: Any = None) -> None:
        super().__init__(text)
        self.best = best


class Budget:
    """What one sitting of a search may cost; stored replies cost nothing.

    Args:
        runs: number of runs, None for any.
        minutes: from now on, None for any.
        clock: seconds that only run.
    """

    def __init__(
        self,
        *,
        runs: int | None = None,
        minutes: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if runs is not None and runs < 0:
            raise UsageError(f"budget: expected a number of runs from 0, got {runs}")
        if minutes is not None and not 0 <= minutes < math.inf:
            raise UsageError(f"budget: expected minutes from 0, got {minutes}")
        self.max_runs = runs
        self.max_minutes = minutes
        self.spent_runs = 0
        self._clock = clock
        self._began_s = clock()

    @property
    def spent_minutes(self) -> float:
        """Since the sitting began."""
        return (self._clock() - self._began_s) / 60

    def check(self, runs: int) -> None:
        """See that a question may be asked.

        Raises:
            OutOfBudget: it costs more runs than are left, or the time is over.
        """
        if runs == 0:
            return
        if self.max_runs is not None and self.spent_runs + runs > self.max_runs:
            raise OutOfBudget(
                f"the budget of {self.max_runs} runs: {self.spent_runs} spent, the next question "
                f"takes up to {runs}"
            )
        if self.max_minutes is not None and self.spent_minutes >= self.max_minutes:
            raise OutOfBudget(f"the budget of {self.max_minutes:g} minutes is spent")

    def spend(self, runs: int) -> None:
        """Take runs off what is left."""
        self.spent_runs += runs


@dataclass(frozen=True, kw_only=True)
class AskedQuestion(Json):
    """One question for people: its answer, and the runs and the time that it cost."""

    words: str
    answer: str
    runs: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Reply(Json):
    """What came of a question that no run of the folder answers.

    Attributes:
        answer: for questions of yes and no; None for others, whose `detail` speaks.
        words: for people, in one line.
        detail: JSON values, as the asker needs them.
    """

    answer: Answer | None = None
    words: str = ""
    detail: dict[str, Any] = field(default_factory=dict)


class Questions:
    """What a search has asked, in order, within the budget of this sitting.

    Args:
        budget: of this sitting; None for any.
        replies: folder of replies that are kept; None to keep none.
        earlier: what sittings before this one have asked and paid.
        told: is given the number and the question with its answer.
    """

    def __init__(
        self,
        budget: Budget | None = None,
        *,
        replies: Path | None = None,
        earlier: Sequence[AskedQuestion] = (),
        told: Callable[[int, AskedQuestion], None] = lambda *_: None,
    ) -> None:
        self.budget = budget or Budget()
        self._replies = replies
        self._earlier = {question.words: question for question in earlier}
        self._told = told
        self._asked: dict[str, AskedQuestion] = {}

    @property
    def asked(self) -> tuple[AskedQuestion, ...]:
        """All of this sitting, each once."""
        return tuple(self._asked.values())

    @property
    def left(self) -> tuple[AskedQuestion, ...]:
        """Those of earlier sittings that this one has not come to."""
        come_to = {question.words for question in self._asked.values()}
        return tuple(q for words, q in self._earlier.items() if words not in come_to)

    def earlier(self, words: str) -> AskedQuestion | None:
        """The question as an earlier sitting has asked it."""
        return self._earlier.get(words)

    def note(self, key: str, words: str, answer: str, runs: int, began_s: float) -> None:
        """Take a question down, once by its key; one that cost nothing now costs what it did."""
        if key in self._asked:
            return
        seconds = round(time.monotonic() - began_s, 3)
        question = AskedQuestion(words=words, answer=answer, runs=runs, seconds=seconds)
        if not runs and (before := self._earlier.get(words)) is not None:
            question = dataclasses.replace(before, answer=answer)
        self._asked[key] = question
        self._told(len(self._asked), question)

    def pay(self, key: str, words: str, runs: int, find_out: Callable[[], Reply]) -> Reply:
        """The kept reply, or the one that `find_out` gives, which is then kept.

        Nothing is kept if it raises, so a question that was interrupted is asked again.

        Args:
            key: name of the file that keeps the reply.
            words: the question for people.
            runs: that it costs.
            find_out: asks.

        Raises:
            OutOfBudget: it costs more than is left.
            Infrastructure: the disk refused.
        """
        path = None if self._replies is None else self._replies / f"{key}.json"
        began_s, reply = time.monotonic(), None
        if path is not None and path.is_file():
            try:
                reply = Reply.from_json(read_object(path))
            except (OSError, RecordError):
                reply = None  # damaged: asked again
        paid = 0 if reply is not None else runs
        if reply is None:
            self.budget.check(runs)
            reply = find_out()
            self.budget.spend(runs)
            if path is not None:
                make_folder(path.parent)
                write_atomic(path, dumps(with_checksum(reply)) + "\n")
        self.note(key, words, reply.words, paid, began_s)
        return reply


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
        questions: takes the questions down, and has the budget; None for any.
        progress: is told of every run.
    """

    def __init__(
        self,
        folder: RunFolder,
        engine: Engine,
        questions: Questions | None = None,
        *,
        progress: Progress | None = None,
    ) -> None:
        self.folder = folder
        self.questions = questions or Questions()
        self.num_runs = 0
        self._adopted: set[str] = set()
        self._ahead: set[str] = set()
        self._engine = engine
        self._progress = progress or Silent()

    def cost(self, *cases: CaseSpec) -> int:
        """How many runs the questions would make."""
        keys = {spec.key for case in cases for spec in runs_of(case)}
        return sum(self.folder.finished(key) is None for key in keys)

    def ask(
        self,
        case: CaseSpec,
        words: str,
        *,
        judge: Judge = judge_case,
        answer: Callable[[Verdict], str] = brief,
    ) -> Asked:
        """Make the runs of a case that are missing, and judge it.

        Args:
            case: the question; its id becomes a folder's name.
            words: the question for people.
            judge: from a case and its three runs to a verdict.
            answer: for people, from the verdict.

        Raises:
            OutOfBudget: it costs more than is left; nothing was run.
            UsageError: a run does not fit on the engine.
            Interrupted: somebody stopped it; what is done is kept.
        """
        cost, key, began_s = self.cost(case), question_key(case), time.monotonic()
        (verdict,) = self._make([case], cost, judge)
        told = answer(verdict)
        if cost or key not in self._ahead:
            self.questions.note(key, words, told, cost, began_s)
        return Asked(runs=load_runs(self.folder, case), verdict=verdict)

    def _make(
        self, cases: Sequence[CaseSpec], cost: int, judge: Judge = judge_case
    ) -> Sequence[Verdict]:
        self.questions.budget.check(cost)
        verdicts = execute(
            self.folder, cases, self._engine, self._progress, judge=judge, confirm=False
        )
        self.num_runs += cost
        self.questions.budget.spend(cost)
        return verdicts

    def unaccounted(self) -> "Asker":
        """For runs that somebody else accounts for, in the same folder and on the same engine."""
        return Asker(self.folder, self._engine, progress=self._progress)

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

        Nothing is made if the first is known, or the budget does not allow them all.

        Args:
            cases: the questions.
            words: of each, for people.

        Raises:
            UsageError: a run does not fit on the engine.
            Interrupted: somebody stopped it; what is done is kept.
        """
        together = f"{words[0]} with the next {len(words) - 1} beside it"
        cost, before, began_s = (
            self.cost(*cases),
            self.questions.earlier(together),
            time.monotonic(),
        )
        if before is None and not self.cost(cases[0]):
            return
        try:
            told = Counter(map(brief, self._make(cases, cost)))
        except OutOfBudget:
            return
        answer = ", ".join(f"{a} ({n} times)" if n > 1 else a for a, n in told.items())
        keys = [question_key(case) for case in cases]
        self._ahead |= set(keys)
        self.questions.note(" and ".join(keys), together, answer, cost, began_s)

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


def judged_by(differ: Callable[[RunResult, RunResult], str]) -> Judge:
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


@dataclass(frozen=True, kw_only=True)
class Failure(Json):
    """How a case fails: the same outcome and `what` are the same failure."""

    outcome: Outcome
    what: What

    def answer(self, verdict: Verdict) -> Answer:
        """What a verdict says of a search for this failure."""
        if (verdict.outcome, verdict.what) == (self.outcome, self.what):
            return FAILS
        return PASSES if verdict.outcome == "passed" else UNRESOLVED

    def __str__(self) -> str:
        """For people: `failed diverged`."""
        return f"{self.outcome} {self.what}".strip()


def failure_of(verdict: Verdict) -> Failure:
    """How a case failed."""
    return Failure(outcome=verdict.outcome, what=verdict.what)


def question_case(
    case: CaseSpec,
    failure: Failure,
    candidate: RunSpec,
    *,
    reference: RunSpec | None = None,
    repeat: int = 0,
) -> CaseSpec:
    """The case with another candidate, or other legs, as a question of a search for a failure.

    Args:
        case: that failed.
        failure: its failure; times are taken only where they are in question.
        candidate: in place of its own.
        reference: in place of its own, with the control that belongs to it.
        repeat: number of the repeat; 0 is the first run.
    """
    control = case.control
    if reference is not None and reference.key != case.reference.key:
        control = dataclasses.replace(reference, replica=1)
    reference = reference or case.reference
    if repeat:
        candidate = dataclasses.replace(candidate, replica=FIRST_REPEAT + repeat)
    checks, repeats = case.checks, case.repeats
    if failure.what not in TIMED:
        checks = {name: limits for name, limits in checks.items() if name != "throughput"}
        repeats = 0
    return dataclasses.replace(
        case, id=f"ask-{candidate.key}-{reference.key[-12:]}", labels={"question": "causes"},
        reference=reference, control=control, candidate=candidate, checks=checks,
        repeats=repeats, skip_reason="",
    )  # fmt: skip


class Judged:
    """Answers whether cases fail the same way, each as often as it takes.

    Args:
        case: that failed.
        failure: how.
        asker: makes the runs.
        verdict: of the case itself, its first run; None to ask for it.

    Attributes:
        patience: how often a case must pass; learnt by `learn`, once a case until then.
        others: verdicts that were neither the failure nor a pass, by candidate.
    """

    def __init__(
        self, case: CaseSpec, failure: Failure, asker: Asker, verdict: Verdict | None = None
    ) -> None:
        self.case, self.failure, self.asker = case, failure, asker
        self.patience: chance.Patience | None = None
        self.others: dict[str, Verdict] = {}
        self.verdicts: dict[str, Verdict] = {}
        self._known: dict[tuple[str, ...], Verdict] = {}
        if verdict is not None:
            self.verdicts[case.candidate.key] = self._known[_keys(case)] = verdict

    def learn(self, num_questions: int, confidence: float) -> None:
        """Run the case itself until its rate of failure is known well enough.

        Raises:
            NeverFails: it fails too seldom for a search.
            OutOfBudget: of the asker.
        """

        def run(number: int) -> Answer:
            ahead = max(chance.ALWAYS_AFTER - number, self.asker.room(self.case))
            return self.once(self.case.candidate, number, ahead=ahead)

        self.patience = chance.learn(run, num_questions=num_questions, confidence=confidence)

    def answer(
        self, candidate: RunSpec, *, reference: RunSpec | None = None, words: str = "",
        sure: bool = False,
    ) -> Answer:  # fmt: skip
        """Whether a case fails the same way; `sure` where a conclusion rests on a pass."""
        known = self.patience
        passes = 1 if known is None else known.confirmations if sure else known.passes

        def run(number: int) -> Answer:
            return self.once(
                candidate, number, reference=reference, words=words, ahead=passes - number
            )

        answer, _ = chance.ask(run, passes)
        return answer

    def once(
        self,
        candidate: RunSpec,
        number: int,
        *,
        reference: RunSpec | None = None,
        words: str = "",
        ahead: int = 1,
    ) -> Answer:
        """Whether one run of a case fails the same way.

        Args:
            candidate, reference: of the case.
            number: counts its runs from 0.
            words: the question for people.
            ahead: how many runs are wanted from this one on, should it pass.
        """
        if number == 0 and candidate.key == (reference or self.case.reference).key:
            return PASSES  # the control is that run
        case, *further = (
            question_case(self.case, self.failure, candidate, reference=reference, repeat=repeat)
            for repeat in range(number, number + max(ahead, 1))
        )
        verdict = self._known.get(_keys(case))
        if verdict is None:
            further = further[: self.asker.room(case) - 1]
            ask = words or "does the case itself fail?"
            numbers = range(number + 1, number + 2 + len(further))
            told = [f"{ask} run {each}" if each > 1 else ask for each in numbers]
            if further:
                self.asker.make_ahead([case, *further], told)
            verdict = self.asker.ask(case, told[0]).verdict
        answer = self.failure.answer(verdict)
        if answer == FAILS:
            self.verdicts.setdefault(candidate.key, verdict)
        if answer == UNRESOLVED:
            self.others.setdefault(candidate.key, verdict)
        return answer


def _keys(case: CaseSpec) -> tuple[str, ...]:
    """Equal for cases of the same runs."""
    return (case.reference.key, case.control.key, case.candidate.key)
