"""Which differences between the legs of a failing case make it fail: the smallest sets of them.

    case -> changes of its candidate -> how often it fails -> minimal sets -> other failures inside

A question is the reference with some of the changes as its candidate, judged as the case was. What
rules refuse is asked of nobody. Where a set of changes fails in another way than the case did, that
failure is searched for as well, among the changes that are not yet known to cause something: of
two faults at once, one often hides the other.

One minimal set (`Minimiser`) is found by halving: the shortest failing prefix of the changes ends
in one that is needed; it is kept, and the rest of the prefix is searched again, until what was kept
fails alone. That takes about log2(n) + 1 questions for each change of the set, and at every moment
the set in hand has been seen to fail, so an answer that is `unresolved` or that contradicts others
makes the search longer, never its result untrue. Where `unresolved` prefixes leave several changes
that cannot be told apart, ddmin (Zeller and Hildebrandt, 2002) takes over; the end is always a
check that no single change can be left out.

Several causes are found by Reiter's tree of hitting sets (1987): leave out a change of every set
that is known, in every way; what still fails holds another, and where nothing does, all are known.
That, and only that, rests on failures being monotone: what fails with some changes fails with more.
Answers that say otherwise are told (`Causes.contradictions`).
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from harness.bisect.chance import (
    CONFIDENCE,
    FAILS,
    PASSES,
    UNRESOLVED,
    Answer,
    NeverFails,
    Patience,
)
from harness.bisect.differences import LegChanges
from harness.bisect.experiments import (
    NONDETERMINISTIC,
    Asker,
    Failure,
    Judged,
    OutOfBudget,
    failure_of,
)
from harness.codec import Json
from harness.records import CaseSpec, Verdict

Changes = frozenset[str]
Test = Callable[[Changes], Answer]
MAX_CAUSES = 8
_MAX_PARTS = 4
"""Legal parts of an illegal set that are asked."""
_MAX_LOOKS = 4096
"""Sets whose legality is looked at to find them."""


@dataclass(frozen=True, kw_only=True)
class Cause(Json):
    """A minimal set of changes that fails: a single one, or some that only fail together.

    Attributes:
        changes: in the order in which the changes were given; none if nothing need change.
        unproven: those of them without which it could not be run, so they may not be at fault.
    """

    changes: tuple[str, ...]
    unproven: tuple[str, ...] = ()

    def __str__(self) -> str:
        """For people: `a and b together`."""
        if not self.changes:
            return "none of the changes"
        together = " together" if len(self.changes) > 1 else ""
        return " and ".join(self.changes) + together


@dataclass(frozen=True, kw_only=True)
class Causes(Json):
    """What a search among changes has found.

    Attributes:
        causes: independent of each other, the first found first.
        complete: whether leaving out a change of each cause passes, in every way.
        candidates: number of changes.
        num_questions: that were asked, what was known before and what is illegal not counted.
        contradictions: a sentence for each pair of answers that are not monotone.
        notes: a sentence for each thing that could not be found out, and why.
        unresolved: the same of sets that cannot be run or fail otherwise.
    """

    causes: tuple[Cause, ...]
    complete: bool
    candidates: int
    num_questions: int
    contradictions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unresolved: tuple[str, ...] = ()


def _any(changes: Changes) -> bool:
    return changes is not None


class Minimiser:
    """Searches the changes for minimal failing sets. Every set is asked once.

    Args:
        changes: their names, those first that others depend on.
        test: asks; may raise `OutOfBudget`, which leaves with what is known so far in `best`.
        legal: whether a set may be asked.
        confirm: asks again, more often, where a conclusion rests on a set having passed; for tests
            that believe a single pass of a fault that may be flaky.
        known: answers of before, as of the full set, or of none.

    Raises:
        ValueError: no change, or one twice.
    """

    def __init__(
        self,
        changes: Sequence[str],
        test: Test,
        *,
        legal: Callable[[Changes], bool] = _any,
        confirm: Test | None = None,
        known: Mapping[Changes, Answer] | None = None,
    ) -> None:
        if not changes or len(set(changes)) != len(changes):
            raise ValueError(f"Expected changes, each once, got {list(changes)}")
        self.changes = tuple(changes)
        self.num_questions = 0
        self._test = test
        self._legal = legal
        self._confirm = confirm
        self._answers: dict[Changes, Answer] = dict(known or {})
        self._confirmed = {s for s, answer in self._answers.items() if answer == PASSES}
        self._found: list[Cause] = []
        self._notes: list[str] = []
        self._open: list[str] = []

    # --- one answer

    def answer(self, changes: Iterable[str]) -> Answer:
        """The answer for a set: a known one, or asked now.

        Raises:
            OutOfBudget: of the test.
        """
        asked = frozenset(changes)
        if asked not in self._answers:
            self._answers[asked] = self._ask(self._test, asked)
        return self._answers[asked]

    def _ask(self, test: Test, asked: Changes) -> Answer:
        if not self._legal(asked):
            return UNRESOLVED
        # Before the test: one that raises has cost something too.
        self.num_questions += 1
        return test(asked)

    def _fails(self, changes: Iterable[str]) -> bool:
        return self.answer(changes) == FAILS

    def _passes_after_all(self, changes: Changes) -> bool:
        """Whether a set that passed still does when it is asked more often."""
        if self._confirm is None or changes in self._confirmed or self.answer(changes) != PASSES:
            return self.answer(changes) != FAILS
        answer = self._ask(self._confirm, changes)
        if answer != FAILS:
            self._confirmed.add(changes)
            return True
        self._note(f"{self._words(changes)}: passed at first and failed when asked again")
        self._answers[changes] = FAILS
        return False

    # --- one minimal set

    def minimal(self, within: Iterable[str] | None = None) -> Cause:
        """One minimal failing set inside of a set that fails, by default of all changes.

        Raises:
            NeverFails: the set does not fail.
            OutOfBudget: of the test.
        """
        whole = self._ordered(self.changes if within is None else within)
        if (answer := self.answer(whole)) != FAILS:
            said = "passes" if answer == PASSES else "cannot be run, or fails otherwise"
            raise NeverFails(f"with {self._words(whole)} it {said}: there is nothing to search")
        while True:
            kept, told_apart = self._halve(whole)
            if not told_apart:
                kept = self._ddmin(kept)
            kept, unproven = self._leave_out_each(kept)
            lucky = next(
                (s for s in self._without_one(kept) if not self._passes_after_all(s)), None
            )
            if lucky is None:
                return Cause(changes=kept, unproven=unproven)
            whole = self._ordered(lucky)

    def _halve(self, whole: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
        """A failing subset, and whether each of its changes was found by itself."""
        kept: tuple[str, ...] = ()
        told_apart = True
        while whole and not self._fails(kept):
            # Invariant: `kept` with all of `whole` fails.
            low, high = 0, len(whole)
            while (middle := self._between(kept, whole, low, high)) is not None:
                if self._fails((*kept, *whole[:middle])):
                    high = middle
                else:
                    low = middle
            told_apart &= high - low == 1
            kept, whole = (*kept, *whole[low:high]), whole[:low]
        return self._ordered(kept), told_apart

    def _between(
        self, kept: tuple[str, ...], whole: tuple[str, ...], low: int, high: int
    ) -> int | None:
        """The length nearest to the middle whose prefix has an answer; None if there is none."""
        middle = (low + high) // 2
        for length in sorted(range(low + 1, high), key=lambda n: abs(n - middle)):
            if self.answer((*kept, *whole[:length])) != UNRESOLVED:
                return length
        return None

    def _ddmin(self, failing: tuple[str, ...]) -> tuple[str, ...]:
        parts = 2
        while len(failing) > 1:
            size = -(-len(failing) // parts)
            chunks = [failing[n : n + size] for n in range(0, len(failing), size)]
            rests = [tuple(c for c in failing if c not in chunk) for chunk in chunks]
            smaller = next((s for s in (*chunks, *rests) if s != failing and self._fails(s)), None)
            if smaller is not None:
                parts = max(parts - 1, 2) if smaller in rests else 2
                failing = smaller
            elif parts >= len(failing):
                break
            else:
                parts = min(2 * parts, len(failing))
        return failing

    def _leave_out_each(self, failing: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """A set of which no single change can be left out; those without which it cannot run."""
        while True:
            whole = frozenset(failing)
            left: tuple[str, ...] | None = next(
                ((c,) for c in failing if self._fails(whole - {c})), None
            )
            unproven = tuple(c for c in failing if self.answer(whole - {c}) == UNRESOLVED)
            if left is None:
                # What cannot go alone may go with others that it needs, or that need it.
                sizes = range(2, len(unproven) + 1) if len(unproven) <= 4 else (2, len(unproven))
                groups = (group for size in sizes for group in combinations(unproven, size))
                left = next((group for group in groups if self._fails(whole - set(group))), None)
            if left is None:
                return failing, unproven
            failing = tuple(c for c in failing if c not in left)

    # --- all of them

    def causes(self, limit: int = MAX_CAUSES) -> Causes:
        """Every minimal failing set, up to a number of them.

        Raises:
            NeverFails: all changes together do not fail.
            OutOfBudget: of the test; `best` is a `Causes` of what was found.
        """
        self._found, self._notes, self._open, complete = [], [], [], False
        try:
            complete = self._grow_tree(limit)
            self._confirm_contradictions()
        except OutOfBudget as error:
            self._note(str(error))
            smallest = min(
                (s for s, a in self._answers.items() if a == FAILS), key=len, default=None
            )
            if smallest is not None:
                self._note(f"the smallest set that was seen to fail: {self._words(smallest)}")
            error.best = self._causes(complete=False)
            raise
        return self._causes(complete=complete)

    def _grow_tree(self, limit: int) -> bool:
        if self._fails(()):
            self._found = [Cause(changes=())]
            self._note("it fails without any of the changes, so none of them is the cause")
            return True
        complete, open_paths, seen = True, [frozenset[str]()], {frozenset[str]()}
        dead_ends: list[Changes] = []
        while open_paths:
            path = open_paths.pop(0)
            cause = next((c for c in self._found if not path & set(c.changes)), None)
            if cause is None:
                if any(short <= path for short in dead_ends):
                    continue
                rest, settled = self._rest(path)
                complete &= settled
                if rest is None:
                    dead_ends.append(path)
                    continue
                if len(self._found) == limit:
                    self._note(f"there are more than {limit} causes")
                    return False
                cause = self.minimal(rest)
                self._found.append(cause)
            for change in cause.changes:
                longer = path | {change}
                if longer not in seen:
                    seen.add(longer)
                    open_paths.append(longer)
        return complete

    def _rest(self, path: Changes) -> tuple[Changes | None, bool]:
        """What still fails without the changes of a path, if so; and whether that is settled."""
        rest = frozenset(self.changes) - path
        if path and not self._legal(rest):
            return self._rest_in_parts(path, rest)
        if self._fails(rest) or not path:
            return rest, True
        if self.answer(rest) == UNRESOLVED:
            self._note(
                f"without {self._words(path)} it cannot be run, or fails otherwise", is_open=True
            )
            return None, False
        return (None if self._passes_after_all(rest) else rest), True

    def _rest_in_parts(self, path: Changes, rest: Changes) -> tuple[Changes | None, bool]:
        parts, settled = self._legal_parts(rest)
        settled &= len(parts) <= _MAX_PARTS
        for part in parts[:_MAX_PARTS]:
            if not self._passes_after_all(part):
                return part, True
            settled &= self.answer(part) == PASSES
        if not settled:
            self._note(
                f"without {self._words(path)} the other changes are illegal together, and not all "
                "of their legal parts could be asked"
            )
        return None, settled

    def _legal_parts(self, changes: Changes) -> tuple[list[Changes], bool]:
        """Legal parts that are in no other, the largest first; whether these are all."""
        ordered, found, left = self._ordered(changes), list[Changes](), _MAX_LOOKS
        for size in range(1, len(ordered) + 1):
            for removed in combinations(ordered, size):
                part = changes - set(removed)
                if any(part <= larger for larger in found):
                    continue
                if not left:
                    return found, False
                left -= 1
                if self._legal(part):
                    found.append(part)
        return found, True

    # --- what it rests on

    def _confirm_contradictions(self) -> None:
        if self._confirm is not None:
            for _, passing in self._contradicting():
                self._passes_after_all(passing)

    def _contradicting(self) -> list[tuple[Changes, Changes]]:
        """Pairs of a set that fails and one that has it inside and passes."""
        failing = [s for s, answer in self._answers.items() if answer == FAILS]
        passing = [s for s, answer in self._answers.items() if answer == PASSES]
        return [(small, large) for large in passing for small in failing if small < large]

    def _causes(self, *, complete: bool) -> Causes:
        return Causes(
            causes=tuple(self._found),
            complete=complete,
            candidates=len(self.changes),
            num_questions=self.num_questions,
            contradictions=tuple(
                f"{self._words(small)} fails, and passes once {self._words(large - small)} is added"
                for small, large in self._contradicting()
            ),
            notes=tuple(self._notes),
            unresolved=tuple(self._open),
        )

    def _without_one(self, kept: tuple[str, ...]) -> list[Changes]:
        return [frozenset(kept) - {change} for change in kept]

    def _ordered(self, changes: Iterable[str]) -> tuple[str, ...]:
        chosen = set(changes)
        return tuple(c for c in self.changes if c in chosen)

    def _words(self, changes: Iterable[str]) -> str:
        ordered = self._ordered(changes)
        if len(ordered) == len(self.changes):
            return "all changes"
        return " + ".join(ordered) or "none of the changes"

    def _note(self, text: str, *, is_open: bool = False) -> None:
        if is_open and text not in self._open:
            self._open.append(text)
        if text not in self._notes:
            self._notes.append(text)


MAX_WAYS = 16
"""Ways to leave a change of each cause out that are asked."""
MAX_OTHERS = 3
"""Failures beside that of the case that are searched for."""


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
        answer = judged.answer(candidate, words=words, sure=confirm)
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
