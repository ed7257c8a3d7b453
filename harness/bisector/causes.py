"""Which differences between the legs of a failing case make it fail: the smallest sets of them.

    case -> changes of its candidate -> how often it fails -> minimal sets -> other failures inside

A question is the reference with some of the changes as its candidate, judged as the case was. What
rules refuse is asked of nobody. Where a set of changes fails in another way than the case did, that
failure is searched for as well, among the changes that are not yet known to cause something: of
two faults at once, one often hides the other.
"""

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from harness.bisector.asking import Asker
from harness.bisector.chance import CONFIDENCE, NeverFails, Patience
from harness.bisector.differences import LegChanges
from harness.bisector.failure import NONDETERMINISTIC, Failure, Judged, failure_of
from harness.bisector.minimise import MAX_CAUSES, Cause, Causes, Minimiser
from harness.bisector.questions import FAILS, PASSES, Answer, OutOfBudget
from harness.codec import Json
from harness.records import CaseSpec, Verdict

MAX_WAYS = 16
"""Ways to leave a change of each cause out that are asked."""
MAX_OTHERS = 3
"""Failures beside that of the case that are searched for."""
Changes = frozenset[str]


@dataclass(frozen=True, kw_only=True)
class FoundCause(Json):
    """A smallest set of changes that fails by itself.

    Attributes:
        changes: names, in the order of the configuration.
        unproven: those of them without which it cannot be run.
        failure: how it fails: as the case does, or in a way that the case's failure hides.
        message: of the verdict of the reference with these changes alone.
    """

    changes: tuple[str, ...]
    unproven: tuple[str, ...]
    failure: Failure
    message: str

    def __str__(self) -> str:
        """For people: `plant: ulp in step 3 and graph: attn together (failed diverged)`."""
        together = " together" if len(self.changes) > 1 else ""
        return f"{' and '.join(self.changes) or 'none of the changes'}{together} ({self.failure})"


@dataclass(frozen=True, kw_only=True)
class FoundCauses(Json):
    """What a search among the differences of two legs has found.

    Attributes:
        candidates: names of all changes.
        causes: smallest sets, those of the case's own failure first.
        complete: whether nothing but these causes makes it fail.
        num_questions: sets of changes that were asked.
        num_runs: that were made.
        num_illegal: sets that rules refused, at no cost.
        patience: how often the case failed, and what is believed for it.
        notes: what could not be found out or contradicts itself, a sentence each.
    """

    candidates: tuple[str, ...]
    causes: tuple[FoundCause, ...] = ()
    complete: bool = False
    num_questions: int = 0
    num_runs: int = 0
    num_illegal: int = 0
    patience: Patience | None = None
    notes: tuple[str, ...] = ()

    @property
    def confidence(self) -> str:
        """How often the case failed, and what is believed for it, in words; "" if unknown."""
        return str(self.patience) if self.patience is not None else ""


def find_causes(
    case: CaseSpec,
    verdict: Verdict,
    asker: Asker,
    *,
    confidence: float = CONFIDENCE,
    max_causes: int = MAX_CAUSES,
) -> FoundCauses:
    """The smallest sets of differences between reference and candidate that still fail.

    Args:
        case: that failed.
        verdict: its answer.
        asker: makes the runs of questions.
        confidence: that no answer of the search is wrong, for faults that fire now and then.
        max_causes: to stop at.

    Raises:
        OutOfBudget: `best` has the `FoundCauses` of what was found.
    """
    legs = LegChanges(case.reference, case.candidate)
    failure = failure_of(verdict)
    if failure.what == NONDETERMINISTIC:
        return FoundCauses(
            candidates=legs.names,
            notes=(
                "the reference differs from its own second run, so no difference between the "
                "legs is the cause",
            ),
        )
    if failure.outcome in ("passed", "skipped") or not legs.names:
        why = "the legs do not differ" if not legs.names else f"the case {failure.outcome}"
        return FoundCauses(candidates=legs.names, notes=(f"nothing to search: {why}",))
    return _Search(case, verdict, asker, legs, confidence, max_causes).carry_out()


def _only(name: str) -> Causes:
    cause = Cause(changes=(name,))
    return Causes(causes=(cause,), complete=True, candidates=1, num_questions=0)


class _Search:
    def __init__(
        self,
        case: CaseSpec,
        verdict: Verdict,
        asker: Asker,
        legs: LegChanges,
        confidence: float,
        max_causes: int,
    ) -> None:
        self._case, self._verdict, self._asker, self._legs = case, verdict, asker, legs
        self._confidence, self._max_causes = confidence, max_causes
        self._runs_before = asker.num_runs
        self._illegal: dict[Changes, str] = {}
        self._causes: list[FoundCause] = []
        self._notes: list[str] = []
        self._open: set[str] = set()
        self._num_questions = 0
        self._others: dict[Changes, Verdict] = {}
        self._judged: Judged | None = None

    def carry_out(self) -> FoundCauses:
        everything = frozenset(self._legs.names)
        complete = False
        try:
            complete = self._search(self._verdict, everything)
            if self._others and not complete:
                self._search_others()
                if complete := self._explains_all():
                    # What was open is explained by the causes of the other failures.
                    self._notes = [note for note in self._notes if note not in self._open]
        except NeverFails as error:
            self._notes.append(str(error))
        except OutOfBudget as error:
            self._notes.append(str(error))
            error.best = self._found(complete=False)
            raise
        return self._found(complete=complete)

    def _search(self, verdict: Verdict, within: Changes) -> bool:
        """Search for one failure among some changes, which fail that way together."""
        failure = failure_of(verdict)
        case = dataclasses.replace(self._case, candidate=self._legs.run_with(within))
        judged = Judged(case, failure, self._asker, verdict)
        names = [name for name in self._legs.names if name in within]
        judged.learn(4 * len(names).bit_length() + 4, self._confidence)
        if self._judged is None:
            self._judged = judged
        if len(names) == 1 and judged.patience is not None and judged.patience.always:
            # The only difference, of legs that each were seen again: nothing to tell apart.
            self._take(_only(names[0]), failure, judged)
            return True
        minimiser = Minimiser(
            names,
            lambda changes: self._ask(judged, changes, confirm=False),
            legal=self._is_legal,
            confirm=lambda changes: self._ask(judged, changes, confirm=True),
            known={within: FAILS},
        )
        try:
            found = minimiser.causes(self._max_causes)
        except OutOfBudget as error:
            if isinstance(error.best, Causes):
                self._take(error.best, failure, judged)
            raise
        finally:
            self._num_questions += minimiser.num_questions
        self._take(found, failure, judged)
        return found.complete

    def _ask(self, judged: Judged, changes: Changes, *, confirm: bool) -> Answer:
        candidate = self._legs.run_with(changes)
        words = f"does it fail with {self._words(changes)}?"
        answer = (judged.confirmed if confirm else judged.answer)(candidate, words=words)
        if candidate.key in judged.others:
            self._others.setdefault(changes, judged.others[candidate.key])
        return answer

    def _is_legal(self, changes: Changes) -> bool:
        why = self._legs.why_illegal(changes)
        if why:
            self._illegal[changes] = why
        return not why

    def _take(self, found: Causes, failure: Failure, judged: Judged) -> None:
        for cause in found.causes:
            candidate = self._legs.run_with(cause.changes)
            verdict = judged.verdicts.get(candidate.key)
            self._causes.append(
                FoundCause(
                    changes=cause.changes, unproven=cause.unproven, failure=failure,
                    message=verdict.message if verdict is not None else "",
                )
            )  # fmt: skip
        self._notes += [*found.contradictions, *found.notes]
        self._open |= set(found.unresolved)

    def _search_others(self) -> None:
        """Failures of another kind that were met on the way, the smallest set of each first."""
        for _ in range(MAX_OTHERS):
            known = [set(cause.changes) for cause in self._causes]
            left = {
                changes: verdict
                for changes, verdict in self._others.items()
                if not any(cause <= changes for cause in known)
                and verdict.outcome in ("failed", "incomparable")
            }
            if not left:
                return
            within = min(left, key=lambda changes: (len(changes), sorted(changes)))
            self._search(left[within], within)

    def _explains_all(self) -> bool:
        """Whether it passes once a change of each cause is left out, in whatever way."""
        assert self._judged is not None
        ways = itertools.product(*(cause.changes for cause in self._causes))
        for left_out in itertools.islice(ways, MAX_WAYS):
            rest = frozenset(self._legs.names) - set(left_out)
            if not self._is_legal(rest) or self._ask(self._judged, rest, confirm=True) != PASSES:
                return False
        return next(ways, None) is None

    def _found(self, *, complete: bool) -> FoundCauses:
        return FoundCauses(
            candidates=self._legs.names,
            causes=tuple(self._causes),
            complete=complete,
            num_questions=self._num_questions,
            num_runs=self._asker.num_runs - self._runs_before,
            num_illegal=len(self._illegal),
            patience=self._judged.patience if self._judged is not None else None,
            notes=tuple(dict.fromkeys((*self._notes, *self._unresolved()))),
        )

    def _unresolved(self) -> Iterable[str]:
        """Sets that failed in another way and are not explained by a cause, a sentence each."""
        known = [set(cause.changes) for cause in self._causes]
        for changes, verdict in self._others.items():
            if not any(cause <= changes for cause in known):
                how = f"{verdict.outcome} {verdict.what}"
                yield f"with {self._words(changes)} it {how}, which no cause explains"

    def _words(self, changes: Iterable[str]) -> str:
        chosen = set(changes)
        if len(chosen) == len(self._legs.names):
            return "all changes"
        return " + ".join(n for n in self._legs.names if n in chosen) or "none of the changes"
