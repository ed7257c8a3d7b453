"""What counts as the same failure, and how often a case is run before it is said to pass.

    verdict -> failure -> case -> fails, passes, unresolved

A case fails the same way if its outcome and its `what` are those of the failure, in whatever step
and tensor. One that fails in another way, or has no verdict, is `unresolved`: it is kept, and said.
Repeats of a case are its candidate with another replica number, so each is a run of its own that
shares reference and control with all the others.
"""

import dataclasses
from dataclasses import dataclass

from harness.bisector import chance
from harness.bisector.asking import Asker
from harness.bisector.questions import FAILS, PASSES, UNRESOLVED, Answer
from harness.codec import Json
from harness.records import CaseSpec, Outcome, RunSpec, Verdict, What
from harness.repeats import FIRST_REPEAT

TIMED: tuple[What, ...] = ("throughput_regression", "noisy")
NONDETERMINISTIC: What = "nondeterministic_reference"


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

    def learn(self, num_questions: int, confidence: float, causes: int = 1) -> None:
        """Run the case itself until its rate of failure is known well enough.

        Raises:
            NeverFails: it fails too seldom for a search.
            OutOfBudget: of the asker.
        """

        def run(number: int) -> Answer:
            ahead = max(chance.ALWAYS_AFTER - number, self.asker.room(self.case))
            return self.once(self.case.candidate, number, ahead=ahead)

        self.patience = chance.learn(
            run,
            num_questions=num_questions, confidence=confidence, causes=causes,
        )  # fmt: skip

    def answer(
        self, candidate: RunSpec, *, reference: RunSpec | None = None, words: str = ""
    ) -> Answer:
        """Whether a case fails the same way; passes are believed for a step of a search."""
        passes = self.patience.passes if self.patience is not None else 1
        return self._often(candidate, reference, words, passes)

    def confirmed(
        self, candidate: RunSpec, *, reference: RunSpec | None = None, words: str = ""
    ) -> Answer:
        """The same where a conclusion rests on a pass."""
        passes = self.patience.confirmations if self.patience is not None else 1
        return self._often(candidate, reference, words, passes)

    def _often(
        self, candidate: RunSpec, reference: RunSpec | None, words: str, passes: int
    ) -> Answer:
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
            if further and self.asker.cost(case):
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
