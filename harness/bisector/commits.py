"""The first bad commit, by `git bisect` in a temporary worktree.

    bad fails, often enough that its rate is known  ->  good passes
      ->  git bisect proposes a commit, runs answer: fails, passes, or unresolved (skipped)
      ->  the passes that the end rests on are asked again  ->  one commit, or the suspects

git only chooses (`bisect start --no-checkout`): commits are checked out where a run is due, so a
search that goes on from its journal costs nothing until it gets to what is new. Commits with the
same files are the same question. A commit that fails once is bad for good; one that passes does so
as often as `chance` asks for. If a pass that the end rests on is taken back, the search starts
again, with all that is known.

What it rests on is what every bisection does: from the first bad commit on, all are bad.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.bisector.chance import CONFIDENCE, NeverFails, Patience, learn, patience
from harness.bisector.commit_answers import CommitAnswers, Say
from harness.bisector.commit_range import Commit, CommitRange, Run, resolve_range
from harness.bisector.questions import FAILS, PASSES, UNRESOLVED, Journal, OutOfBudget
from harness.bisector.worktree import temporary_worktree
from harness.checks.evidence import count
from harness.codec import Json
from harness.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class CommitSearch(Json):
    """What a search among commits has found.

    Attributes:
        first_bad: None if it is not known which of the suspects.
        suspects: that may be the first bad commit, the newest first.
        skipped: commits of the range that gave no verdict.
        good, bad: ends of the range.
        num_commits: that could be the first bad one at the beginning.
        num_runs: tries of commits, of this and earlier sittings.
        patience: in words: how often passes were asked for, and why.
        notes: a sentence for whatever else one should know.
        stopped: why the search ended before its end, or "".
    """

    first_bad: Commit | None
    suspects: tuple[Commit, ...]
    skipped: tuple[Commit, ...]
    good: Commit
    bad: Commit
    num_commits: int
    num_runs: int
    patience: str = ""
    notes: tuple[str, ...] = ()
    stopped: str = ""

    def __str__(self) -> str:
        """One line."""
        cost = f"asked {count(self.num_runs, 'time')}, of {count(self.num_commits, 'commit')}"
        if self.first_bad is not None:
            return f"first bad commit: {self.first_bad} ({cost})"
        why = self.stopped or f"{len(self.skipped)} commits gave no verdict"
        newest, oldest = self.suspects[0], self.suspects[-1]
        return (
            f"first bad commit: one of {len(self.suspects)}, from {oldest} to {newest} "
            f"({why}; {cost})"
        )


def find_first_bad(
    where: CommitRange,
    run: Run,
    journal: Journal,
    *,
    name: str = "",
    once: bool = False,
    known: Patience | None = None,
    cost: int = 1,
    say: Say = lambda _: None,
) -> CommitSearch:
    """Search a range of commits for the first on which a run fails.

    Args:
        where: the commits.
        run: makes one run in a checkout.
        journal: keeps the answers, and has the budget.
        name: of what is run, for the keys of questions: another name is another question.
        once: the fault is known to fire in every run: one run a commit, and no more.
        known: how often the case has failed as it is here, where here is the bad commit: that it
            fails there is seen once more, and its rate is taken from this.
        cost: of one run, for the budget: a case is three runs.
        say: is told of every step, in one line.

    Raises:
        UsageError: git says no, good does not pass, bad does not fail.
        OutOfBudget: `best` is a `CommitSearch` of what was found.
    """
    top, good, bad = resolve_range(where)
    with temporary_worktree(top, bad) as worktree:
        asked = CommitAnswers(
            worktree, replace(where, root=top), run, journal, name=name, cost=cost, say=say
        )  # fmt: skip
        return _Search(asked, good, bad, once=once, known=known).find()


class _Search:
    def __init__(
        self, asked: CommitAnswers, good: str, bad: str, *, once: bool,
        known: Patience | None,
    ) -> None:  # fmt: skip
        self._asked = asked
        asked.read(good, bad)
        self._good, self._bad = good, bad
        self._once = once
        self._known = known
        self._suspects = asked.commits(bad, [good])
        self._num_commits = len(self._suspects)
        self._skipped: set[str] = set()
        self._patience: Patience | None = None
        self._notes: list[str] = []

    def find(self) -> CommitSearch:
        try:
            self._learn(flaky=False)
            self._see_good_pass()
            while True:
                goods = self._bisect()
                lucky = next((c for c in self._boundary(goods) if not self._stands(c)), None)
                if lucky is None:
                    return self._found()
                self._notes.append(
                    f"{self._asked.words(lucky)}: passed at first and failed when asked again"
                )
                if lucky == self._good:
                    raise self._good_fails()
                self._learn(flaky=True)
        except OutOfBudget as error:
            error.best = replace(self._found(), first_bad=None, stopped=str(error))
            raise

    # --- the ends of the range

    def _learn(self, *, flaky: bool) -> None:
        bad = self._asked.words(self._bad)
        if self._once:
            if self._asked.answer(self._bad, 1) != FAILS:
                raise UsageError(f"--commits: expected a bad commit that fails, got {bad}")
            return
        # Halvings, both ends, and what skips may add.
        num_questions = math.ceil(math.log2(self._num_commits + 1)) + 2
        if self._known is not None and not flaky and self._asked.once(self._bad, 0) == FAILS:
            self._patience = patience(
                self._known.failures, self._known.trials,
                num_questions=num_questions, confidence=CONFIDENCE,
            )  # fmt: skip
            self._asked.say(str(self._patience))
            return
        try:
            self._patience = learn(
                lambda attempt: self._asked.once(self._bad, attempt),
                num_questions=num_questions, confidence=CONFIDENCE, flaky=flaky,
            )  # fmt: skip
        except NeverFails as error:
            raise UsageError(
                f"--commits: expected a bad commit that fails, got {bad}: {error}"
            ) from error
        self._asked.say(str(self._patience))

    def _see_good_pass(self) -> None:
        answer = self._asked.answer(self._good, self._passes)
        if answer == FAILS:
            raise self._good_fails()
        if answer == UNRESOLVED:
            good = self._asked.words(self._good)
            raise UsageError(f"--commits: expected a good commit that can be run, got {good}")

    def _good_fails(self) -> UsageError:
        good = self._asked.words(self._good)
        return UsageError(
            f"--commits: expected a good commit that passes, got {good}, which fails: name an "
            "older one"
        )

    @property
    def _passes(self) -> int:
        return self._patience.passes if self._patience is not None else 1

    @property
    def _confirmations(self) -> int:
        return self._patience.confirmations if self._patience is not None else 1

    # --- between them

    def _bisect(self) -> list[str]:
        """Let git choose until it has one, or only skipped ones; the good commits."""
        git, bad, goods = self._asked.git, self._bad, [self._good]
        git("bisect", "reset", legal=(0, 1))
        git("bisect", "start", "--no-checkout", bad, self._good)
        self._suspects = self._asked.commits(bad, goods)
        while not set(self._suspects) - {bad} <= self._skipped:
            commit = git("rev-parse", "--verify", "BISECT_HEAD")
            assert commit in self._suspects, f"git asks for {commit}, which is settled"
            answer = self._asked.answer(commit, self._passes)
            if answer == FAILS:
                bad = commit
            elif answer == PASSES:
                goods.append(commit)
            else:
                self._skipped.add(commit)
            term = {FAILS: "bad", PASSES: "good", UNRESOLVED: "skip"}[answer]
            # 2: only skipped commits are left.
            git("bisect", term, commit, legal=(0, 2))
            self._suspects = self._asked.commits(bad, goods)
        return goods

    def _boundary(self, goods: Sequence[str]) -> list[str]:
        """The good commits that the suspects stand on; all others that are good are older."""
        git = self._asked.git
        parents = {p for c in self._suspects for p in git("rev-parse", f"{c}^@").split()}
        return [
            commit
            for commit in goods
            if any(git("merge-base", parent, commit, legal=(0, 1)) == parent for parent in parents)
        ]

    def _stands(self, commit: str) -> bool:
        return self._asked.answer(commit, self._confirmations) == PASSES

    def _found(self) -> CommitSearch:
        asked, suspects = self._asked, tuple(map(self._asked.words, self._suspects))
        return CommitSearch(
            first_bad=suspects[0] if len(suspects) == 1 else None,
            suspects=suspects,
            skipped=tuple(asked.words(c) for c in sorted(self._skipped)),
            good=asked.words(self._good),
            bad=asked.words(self._bad),
            num_commits=self._num_commits,
            num_runs=asked.num_runs,
            patience=str(self._patience) if self._patience is not None else "one run a commit",
            notes=(*self._notes, *asked.notes),
        )
