"""Questions of a search: how often each is asked, who makes its runs, what is kept.

A question is a case whose runs are made in the search's own run folder and judged by the same
checks. The folder is the cache, by `RunSpec.key`; what no run of it answers (another commit's
harness) leaves its reply in a file. A case fails the same way if its outcome and `what` are those
of the failure; one that fails in another way, or has no verdict, is `unresolved`.
"""

import dataclasses
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from harness.checks import judge as judge_case
from harness.checks.complete import find_flaw
from harness.engine import Engine
from harness.errors import HarnessError, Infrastructure
from harness.records import CaseSpec, ExitCode, Outcome, RunResult, RunSpec, Verdict, What
from harness.repeats import CONFIRMING, FIRST_REPEAT, runs_of
from harness.runner.run import Judge, View, execute
from harness.store import LEGS, OUTCOME_FILE, CaseRuns, RunFolder
from harness.store.files import link_tree, make_folder, read_object, write_object
from harness.values import Json, RecordError

TIMED: tuple[What, ...] = ("throughput_regression", "noisy")

# --- how often to ask ------------------------------------------------------------------------

Answer = Literal["fails", "passes", "unresolved"]
CONFIDENCE = 0.99
ALWAYS_AFTER = 5
"""Failures in a row, from the first run on, after which a fault is taken for one of every run."""
FAILURES = 10
"""Failures of the full case after which its rate is known well enough, if some runs passed."""
MAX_TRIALS = 200
MAX_SILENT = 30
"""Passes of the full case, and no failure, after which it is given up: 2 in 100,000 at 30 %."""


class NeverFails(HarnessError):
    """The full case does not fail, or too seldom, so there is nothing to search for."""

    exit_code: ClassVar[ExitCode] = ExitCode.NO_VERDICT


@dataclass(frozen=True, kw_only=True)
class RepeatPolicy(Json):
    """How many consecutive passes count as a pass: on the way, and where a conclusion rests on it.

    Learnt from `failures` in `trials` runs of the full case. A failure counts at once.
    """

    failures: int
    trials: int
    passes: int
    confirmations: int

    @property
    def always(self) -> bool:
        """Whether the fault is taken for one of every run."""
        return self.failures == self.trials

    def __str__(self) -> str:
        once = f"1 pass counts, {self.confirmations} where the conclusion rests on it"
        every = f"{self.passes} consecutive passes count as passed ({CONFIDENCE:.0%})"
        seen = f"the full case failed in {self.failures} of {self.trials} runs"
        return f"{seen}: {once if self.passes < self.confirmations else every}"

    @staticmethod
    def of(
        failures: int, trials: int, num_questions: int, *, flaky: bool = False
    ) -> "RepeatPolicy":
        """Of a case that was run until it had failed `failures` times.

        Whatever its rate p, that it took so many trials and then passes n times in a row, wrongly,
        has a probability of (1 - CONFIDENCE) / num_questions at most.
        """
        doubt = (1 - CONFIDENCE) / num_questions
        if failures < trials or flaky:
            n = max(math.ceil((doubt ** (-1 / failures) - 1) * trials), 1)
            return RepeatPolicy(failures=failures, trials=trials, passes=n, confirmations=n)
        # The worst rate p for failing `failures` times and passing n times next: p^f (1 - p)^n.
        n = 1
        while (p := failures / (failures + n)) ** failures * (1 - p) ** n > doubt:
            n += 1
        return RepeatPolicy(failures=failures, trials=trials, passes=1, confirmations=n)


EVERY_RUN = RepeatPolicy(failures=1, trials=1, passes=1, confirmations=1)
"""Of a fault that somebody knows to fire in every run."""


def learn(run: Callable[[int], Answer], *, num_questions: int, flaky: bool = False) -> RepeatPolicy:
    """Run the full failing case until its rate is known well enough (`NeverFails`: too seldom).

    `run` takes the number of runs before; a `flaky` case was seen to pass, so one pass is never
    enough.
    """
    answers: list[Answer] = []
    while answers.count("fails") < (FAILURES if flaky or "passes" in answers else ALWAYS_AFTER):
        if len(answers) == (MAX_TRIALS if "fails" in answers else MAX_SILENT):
            seen = answers.count("fails")
            raise NeverFails(f"the full case failed in {seen} of {len(answers)} runs: too seldom")
        answers.append(run(len(answers)))
        if answers[-1] == "unresolved":
            raise NeverFails(f"run {len(answers)} of the full case gave no answer")
    return RepeatPolicy.of(answers.count("fails"), len(answers), num_questions, flaky=flaky)


# --- what was asked --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AskedQuestion(Json):
    """One question for people: its answer, and the runs and seconds that it took."""

    words: str
    answer: str
    runs: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Reply(Json):
    """What came of a question that no run of the folder answers; `words` are for people."""

    answer: Answer
    words: str = ""


class Questions:
    """What a search has asked, in order: `told` hears of it, the folder `replies` keeps it."""

    def __init__(
        self, replies: Path | None = None,
        told: Callable[[int, AskedQuestion], None] = lambda *_: None,
    ) -> None:  # fmt: skip
        self._replies, self._told = replies, told
        self._asked: dict[str, AskedQuestion] = {}

    @property
    def asked(self) -> tuple[AskedQuestion, ...]:
        return tuple(self._asked.values())

    def note(self, key: str, words: str, answer: str, runs: int, began_s: float) -> None:
        """Take a question down, once by its key."""
        if key not in self._asked:
            seconds = round(time.monotonic() - began_s, 3)
            self._asked[key] = AskedQuestion(words=words, answer=answer, runs=runs, seconds=seconds)
            self._told(len(self._asked), self._asked[key])

    def reply(self, key: str, words: str, runs: int, find_out: Callable[[], Reply]) -> Reply:
        """The reply that the file `key` keeps, or that `find_out` gives by so many runs."""
        path, began_s = self._replies and self._replies / f"{key}.json", time.monotonic()
        kept: Reply | None = None
        with suppress(OSError, RecordError):  # not there, or damaged
            kept = Reply.from_json(read_object(path)) if path is not None else None
        reply = kept or find_out()
        if kept is None and path is not None:
            make_folder(path.parent)
            write_object(path, reply)
        self.note(key, words, reply.words, 0 if kept else runs, began_s)
        return reply


# --- who makes the runs ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Failure(Json):
    """How a case fails: the same outcome and `what` are the same failure."""

    outcome: Outcome
    what: What

    def answer(self, verdict: Verdict) -> Answer:
        if failure_of(verdict) == self:
            return "fails"
        return "passes" if verdict.outcome == "passed" else "unresolved"

    def __str__(self) -> str:
        """For people: `failed diverged`."""
        return f"{self.outcome} {self.what}".strip()


def failure_of(verdict: Verdict) -> Failure:
    """How a case failed."""
    return Failure(outcome=verdict.outcome, what=verdict.what)


class Asked(NamedTuple):
    """What came of a question: the case with the records of its runs, and the verdict."""

    runs: CaseRuns
    verdict: Verdict


class Asker:
    """Makes the runs of questions in one locked folder."""

    def __init__(
        self, folder: RunFolder, engine: Engine, questions: Questions | None = None,
        *, progress: View | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.questions, self.num_runs = folder, questions or Questions(), 0
        self._adopted: set[str] = set()
        self._engine, self._progress = engine, progress or View()

    def ask(
        self, case: CaseSpec, words: str, *, judge: Judge = judge_case,
        answer: Callable[[Verdict], object] = failure_of,
    ) -> Asked:  # fmt: skip
        """Make the runs of a case that are missing, and judge it; no words, no note."""
        (verdict,) = self.ask_all([case], words, judge=judge, answer=answer)
        legs: dict[str, Any] = {leg: self.folder.load_run(getattr(case, leg)) for leg in LEGS}
        return Asked(runs=CaseRuns(case=case, **legs), verdict=verdict)

    def ask_all(
        self, cases: Sequence[CaseSpec], words: str, *, judge: Judge = judge_case,
        answer: Callable[[Verdict], object] = failure_of,
    ) -> Sequence[Verdict]:  # fmt: skip
        """As `ask`, of several cases whose runs are made side by side, as one question."""
        keys, began_s = {spec.key for case in cases for spec in runs_of(case)}, time.monotonic()
        cost = sum(self.folder.finished(key) is None for key in keys)
        verdicts = execute(
            self.folder, cases, self._engine, self._progress, judge=judge, confirm=False
        )
        self.num_runs += cost
        if words:
            told = Counter(str(answer(verdict)) for verdict in verdicts)
            said = ", ".join(f"{each} ({n} times)" if n > 1 else each for each, n in told.items())
            key = " and ".join(map(question_key, cases))
            self.questions.note(key, words, said, cost, began_s)
        return verdicts

    @property
    def num_made(self) -> int:
        """Runs that the folder holds and that were made here, now or earlier."""
        made = {path.parent.name for path in self.folder.path.glob(f"runs/*/{OUTCOME_FILE}")}
        return len(made - self._adopted)

    def room(self, case: CaseSpec) -> int:
        """How many candidates of a case fit on the engine side by side."""
        return max(1, self._engine.slots // case.candidate.world_size)

    def adopt(self, place: Path, case: CaseSpec) -> None:
        """Take the finished runs of a case folder (`Infrastructure`: the disk refused)."""
        for leg in LEGS:
            source, target = place / leg, self.folder.run_folder(getattr(case, leg).key)
            if not (source / OUTCOME_FILE).is_file():
                continue
            self._adopted.add(target.name)
            if target.exists():
                continue
            building = target.with_name(f".{target.name}.tmp")
            try:
                shutil.rmtree(building, ignore_errors=True)
                make_folder(target.parent)
                link_tree(source, building)
                building.rename(target)
            except (OSError, shutil.Error) as error:
                raise Infrastructure(f"cannot take over {source}: {error}") from error


def runs_key(case: CaseSpec) -> str:
    """The same for the same three runs."""
    return " ".join(getattr(case, leg).key for leg in LEGS)


def question_key(case: CaseSpec) -> str:
    """The same for the same question: which runs, and what is asked of them."""
    return f"{runs_key(case)} {','.join(sorted(case.checks))}"


def judged_by(differ: Callable[[RunResult, RunResult], str]) -> Judge:
    """A judge of questions without a control: what `differ` says of the runs, "" for nothing."""

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
            case_id=case.id, what=what if told else "", checks=(), wall_s=0.0,
            outcome="error" if flaw is not None else "failed" if told else "passed",
            message=told or "the runs are equal: what failed did not come back",
            runs={leg: getattr(case, leg).key for leg in LEGS},
        )  # fmt: skip

    return judge


def question_of(
    case: CaseSpec, asks: str, reference: RunSpec, candidate: RunSpec, *,
    control: RunSpec | None = None, **fields: Any,
) -> CaseSpec:  # fmt: skip
    """The case over other runs, as a question; its control is the reference, if nothing else is."""
    named: dict[str, Any] = {"labels": {"question": asks}, "repeats": 0}
    named |= {"id": f"{asks}-{candidate.key}"} | fields
    return dataclasses.replace(
        case, reference=reference, control=control or reference, candidate=candidate,
        skip_reason="", **named,
    )  # fmt: skip


def made_anew(case: CaseSpec) -> CaseSpec:
    """The case with new replica numbers, so that all three of its runs are made again."""
    legs: dict[str, Any] = {
        leg: dataclasses.replace(getattr(case, leg), replica=CONFIRMING - number)
        for number, leg in enumerate(LEGS, 1)
    }
    return dataclasses.replace(case, **legs)


def again(spec: RunSpec, number: int) -> RunSpec:
    """The repeat of a run of that number, which of 0 is the run itself."""
    return dataclasses.replace(spec, replica=FIRST_REPEAT + number) if number else spec


def question_case(
    case: CaseSpec, failure: Failure, candidate: RunSpec, *, reference: RunSpec | None = None,
    repeat: int = 0,
) -> CaseSpec:  # fmt: skip
    """The case with another candidate, or reference, as a question; times only if they matter."""
    control = case.control
    if reference is not None and reference.key != case.reference.key:
        control = dataclasses.replace(reference, replica=1)
    reference, candidate = reference or case.reference, again(candidate, repeat)
    is_timed = failure.what in TIMED
    checks = {name: how for name, how in case.checks.items() if is_timed or name != "throughput"}
    return question_of(
        case, "ask", reference, candidate, control=control, checks=checks,
        id=f"ask-{candidate.key}-{reference.key[-12:]}", repeats=case.repeats if is_timed else 0,
    )  # fmt: skip


class Judged:
    """Answers whether cases fail as one that failed did, each as often as `policy` asks.

    `seen` has the verdicts of candidates that did not pass, by key.
    """

    def __init__(
        self, case: CaseSpec, failure: Failure, asker: Asker, verdict: Verdict | None = None,
        policy: RepeatPolicy | None = None,
    ) -> None:  # fmt: skip
        self.case, self.failure, self.asker = case, failure, asker
        self.policy = policy or EVERY_RUN
        self.seen: dict[str, Verdict] = {}
        self._known: dict[str, Verdict] = {}
        if verdict is not None:
            self.seen[case.candidate.key] = self._known[runs_key(case)] = verdict

    def learn(self, num_questions: int) -> RepeatPolicy:
        def run(number: int) -> Answer:
            ahead = max(ALWAYS_AFTER - number, self.asker.room(self.case))
            return self._once(
                self.case.candidate, number, None, "does the case itself fail?", ahead
            )

        self.policy = learn(run, num_questions=num_questions)
        return self.policy

    def answer(
        self, candidate: RunSpec, *, reference: RunSpec | None = None, words: str = "",
        sure: bool = False,
    ) -> Answer:  # fmt: skip
        """Whether a case fails the same way; `sure` where a conclusion rests on a pass."""
        passes = self.policy.confirmations if sure else self.policy.passes
        for number in range(passes):
            found = self._once(candidate, number, reference, words, passes - number)
            if found != "passes":
                return found  # what cannot be run once is not run again and again
        return "passes"

    def _once(
        self, candidate: RunSpec, number: int, reference: RunSpec | None, words: str, ahead: int
    ) -> Answer:
        """Whether run `number` of a case fails the same way; the next `ahead` - 1 are wanted."""
        if number == 0 and candidate.key == (reference or self.case.reference).key:
            return "passes"  # the control is that run
        cases = [
            question_case(self.case, self.failure, candidate, reference=reference, repeat=repeat)
            for repeat in range(number, number + max(ahead, 1))
        ]
        if runs_key(cases[0]) not in self._known:
            cases = cases[: self.asker.room(cases[0])]
            first, last = number + 1, number + len(cases)
            told = words
            if last > 1:
                told += f" run {first}" if first == last else f" runs {first} to {last}"
            verdicts = self.asker.ask_all(cases, told)
            self._known |= dict(zip(map(runs_key, cases), verdicts, strict=True))
        verdict = self._known[runs_key(cases[0])]
        answer = self.failure.answer(verdict)
        if answer != "passes":
            self.seen.setdefault(candidate.key, verdict)
        return answer
