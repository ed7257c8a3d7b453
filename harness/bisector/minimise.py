"""Minimal failing sets of changes: what makes the difference, of all that differs.

    changes     named differences between a configuration that passes and one that fails
    test(set)   does the passing configuration with these changes fail?
    legal(set)  may it be asked at all? costs nothing; what is illegal is `unresolved`

One minimal set is found by halving: the shortest failing prefix of the changes ends in one that is
needed; it is kept, and the rest of the prefix is searched again, until what was kept fails alone.
That takes about log2(n) + 1 questions for each change of the set, and at every moment the set in
hand has been seen to fail, so an answer that is `unresolved` or that contradicts others makes the
search longer, never its result untrue. Where `unresolved` prefixes leave several changes that
cannot be told apart, ddmin (Zeller and Hildebrandt, 2002) takes over; the end is always a check
that no single change can be left out.

Several causes are found by Reiter's tree of hitting sets (1987): leave out a change of every set
that is known, in every way; what still fails holds another, and where nothing does, all are known.
That, and only that, rests on failures being monotone: what fails with some changes fails with more.
Answers that say otherwise are told (`Causes.contradictions`).

Alternatives considered: QuickXplain (Junker, 2004) asks more for sets of one to three (on average
6.7 questions in place of 5.3 for one of 20 changes, 17.1 in place of 14.3 for two of 64), and less
only from sets of five on; where answers are missing, its result may pass. ddmin alone asks n or
more.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from harness.bisector.chance import NeverFails
from harness.bisector.questions import FAILS, PASSES, UNRESOLVED, Answer, OutOfBudget
from harness.codec import Json

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
