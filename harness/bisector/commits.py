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

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.bisector.chance import CONFIDENCE, NeverFails, Patience, learn
from harness.bisector.questions import (
    FAILS,
    PASSES,
    UNRESOLVED,
    Answer,
    Journal,
    OutOfBudget,
    Question,
    Reply,
)
from harness.bisector.worktree import Git, Worktree, temporary_worktree, top_level
from harness.codec import Json
from harness.errors import UsageError, shown

Say = Callable[[str], None]
HASH_CHARS = 10


@dataclass(frozen=True)
class CommitRange:
    """Where to search.

    Attributes:
        root: anywhere in the repository; nothing of it is changed.
        commits: `good..bad`.
        paths: all that decides an answer; empty for every file of a commit.
    """

    root: Path
    commits: str
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """One try of one commit.

    Attributes:
        folder: worktree with the commit's files.
        repository: the user's checkout, of which nothing must come into the run.
        commit: its full hash.
        attempt: tries of it before this one.
    """

    folder: Path
    repository: Path
    commit: str
    attempt: int


Run = Callable[[Checkout], Reply]
"""Makes one run; its reply has an answer."""


@dataclass(frozen=True, kw_only=True)
class Commit(Json):
    """A commit as people name it."""

    hash: str
    subject: str

    def __str__(self) -> str:
        """Short hash and subject."""
        return f"{self.hash[:HASH_CHARS]} {self.subject}"


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
        cost = f"{self.num_runs} runs for {self.num_commits} commits"
        if self.first_bad is not None:
            return f"first bad commit: {self.first_bad} ({cost})"
        why = self.stopped or f"{len(self.skipped)} commits gave no verdict"
        newest, oldest = self.suspects[0], self.suspects[-1]
        return (
            f"first bad commit: one of {len(self.suspects)}, from {oldest} to {newest} "
            f"({why}; {cost})"
        )


def parse_range(text: str) -> tuple[str, str]:
    """Good and bad of `good..bad`; no bad is HEAD.

    Raises:
        UsageError: it is no such range.
    """
    good, dots, bad = text.partition("..")
    if not good or not dots or bad.startswith(".") or good.startswith("-"):
        raise UsageError(f"--commits: expected GOOD..BAD, got {shown(text)}")
    return good, bad or "HEAD"


def resolve_range(where: CommitRange) -> tuple[Path, str, str]:
    """The repository's root, and the full hashes of good and bad.

    Raises:
        UsageError: no repository, no range, no such commit, or bad does not descend from good.
    """
    top = top_level(where.root)
    good, bad = (Git(top).resolve(end) for end in parse_range(where.commits))
    if good == bad or Git(top)("merge-base", good, bad, legal=(0, 1)) != good:
        raise UsageError(
            "--commits: expected a good commit that the bad one descends from, got "
            f"{shown(where.commits)}"
        )
    return top, good, bad


def find_first_bad(
    where: CommitRange,
    run: Run,
    journal: Journal,
    *,
    name: str = "",
    confidence: float = CONFIDENCE,
    once: bool = False,
    cost: int = 1,
    say: Say = lambda _: None,
) -> CommitSearch:
    """Search a range of commits for the first on which a run fails.

    Args:
        where: the commits.
        run: makes one run in a checkout.
        journal: keeps the answers, and has the budget.
        name: of what is run, for the keys of questions: another name is another question.
        confidence: with which the answer is right, if the fault fires in some runs only.
        once: the fault is known to fire in every run: one run a commit, and no more.
        cost: of one run, for the budget: a case is three runs.
        say: is told of every step, in one line.

    Raises:
        UsageError: git says no, good does not pass, bad does not fail.
        OutOfBudget: `best` is a `CommitSearch` of what was found.
    """
    top, good, bad = resolve_range(where)
    with temporary_worktree(top, bad) as worktree:
        asked = _Asked(
            worktree, replace(where, root=top), run, journal, name=name, cost=cost, say=say
        )  # fmt: skip
        return _Search(asked, good, bad, confidence=confidence, once=once).find()


class _Asked:
    """Answers of commits, run by run, over the journal."""

    def __init__(
        self, worktree: Worktree, where: CommitRange, run: Run, journal: Journal,
        *, name: str, cost: int, say: Say,
    ) -> None:  # fmt: skip
        self.git = worktree.git
        self.say = say
        self.num_runs = 0
        self._worktree = worktree
        self._where = where
        self._run = run
        self._journal = journal
        self._name = name
        self._cost = cost
        self._files: dict[str, str] = {}
        self._subjects: dict[str, str] = {}
        self._answers: dict[str, list[Answer]] = {}

    def read(self, good: str, bad: str) -> None:
        """Look up files and subjects of all commits at once."""
        for ends in ((bad, f"^{good}"), ("--no-walk", good)):
            for line in self.git("log", "--format=%H %T %s", *ends, "--").splitlines():
                commit, tree, subject = line.split(" ", 2)
                self._subjects[commit] = subject
                if not self._where.paths:
                    self._files[commit] = tree

    def words(self, commit: str) -> Commit:
        return Commit(hash=commit, subject=self._subjects[commit])

    def commits(self, bad: str, goods: Sequence[str]) -> list[str]:
        """What may be the first bad commit, the newest first."""
        return self.git("rev-list", "--topo-order", bad, "--not", *goods, "--").split()

    def once(self, commit: str, attempt: int) -> Answer:
        """One run, which may be known already."""
        files = self._files_of(commit)
        answers = self._answers.setdefault(files, [])
        if attempt < len(answers):
            return answers[attempt]
        told = self.words(commit)
        again = f" (run {attempt + 1})" if attempt else ""
        question = Question(
            key=f"commit {self._name} {files} {attempt}", words=f"does {told} fail?{again}",
            runs=self._cost,
        )  # fmt: skip

        def find_out() -> Reply:
            self._worktree.check_out(commit)
            checkout = Checkout(
                folder=self._worktree.folder, repository=self._where.root,
                commit=commit, attempt=attempt,
            )  # fmt: skip
            return replace(self._run(checkout), runs=self._cost)

        reply = self._journal.ask(question, find_out)
        answer: Answer = reply.answer or UNRESOLVED
        self.num_runs += 1
        self.say(f"{told}: {answer}{again}" + (f": {reply.words}" if reply.words else ""))
        answers.append(answer)
        return answer

    def answer(self, commit: str, passes: int) -> Answer:
        """Fails once it has failed, passes after so many runs; all runs so far count."""
        known = self._answers.get(self._files_of(commit), [])
        for number in range(max(passes, len(known))):
            if (answer := self.once(commit, number)) != PASSES:
                return answer
        return PASSES

    def _files_of(self, commit: str) -> str:
        """The same for commits whose files are the same."""
        if commit not in self._files:
            listed = self.git("ls-tree", commit, "--", *self._where.paths)
            self._files[commit] = hashlib.sha256(listed.encode()).hexdigest()[:40]
        return self._files[commit]


class _Search:
    def __init__(
        self, asked: _Asked, good: str, bad: str, *, confidence: float, once: bool
    ) -> None:
        self._asked = asked
        asked.read(good, bad)
        self._good, self._bad = good, bad
        self._confidence = confidence
        self._once = once
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
        try:
            self._patience = learn(
                lambda attempt: self._asked.once(self._bad, attempt),
                num_questions=num_questions, confidence=self._confidence, flaky=flaky,
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
            notes=tuple(self._notes),
        )
