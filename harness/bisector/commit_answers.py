"""Answers of commits, run by run: each is checked out where a run of it is due, and asked once.

Commits with the same files are the same question.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from harness.bisector.commit_range import LEFT_OUT, PUT_IN, Checkout, Commit, CommitRange, Run
from harness.bisector.questions import PASSES, UNRESOLVED, Answer, Journal, Question, Reply
from harness.bisector.worktree import Worktree

Say = Callable[[str], None]
OF_COMMITS = "commit "
"""Begins the key of every question about a commit."""


class CommitAnswers:
    """Answers of commits over a journal.

    Args:
        worktree: is given the files of whatever is run.
        where: the commits.
        run: makes one run.
        journal: keeps the answers, and has the budget.
        name: of what is run.
        cost: of one run.
        say: is told of every answer, in one line.

    Attributes:
        num_runs: tries of commits, of this and earlier sittings.
    """

    def __init__(
        self, worktree: Worktree, where: CommitRange, run: Run, journal: Journal,
        *, name: str, cost: int, say: Say,
    ) -> None:  # fmt: skip
        self.git = worktree.git
        self.say = say
        self.num_runs = 0
        self._settings: dict[str, dict[str, None]] = {LEFT_OUT: {}, PUT_IN: {}}
        self._worktree = worktree
        self._where = where
        self._run = run
        self._journal = journal
        self._name = name
        self._cost = cost
        self._files: dict[str, str] = {}
        self._subjects: dict[str, str] = {}
        self._answers: dict[str, list[Answer]] = {}

    @property
    def notes(self) -> list[str]:
        """A sentence for each kind of setting that not all commits have."""
        words = {
            LEFT_OUT: "settings that not every commit knows are left out there, at their defaults",
            PUT_IN: "settings that only some commits know are at their defaults there",
        }
        return [f"{words[kind]}: {', '.join(s)}" for kind, s in self._settings.items() if s]

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
            key=f"{OF_COMMITS}{self._name} {files} {attempt}", words=f"does {told} fail?{again}",
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
        for kind, settings in self._settings.items():
            settings |= dict.fromkeys(map(str, reply.detail.get(kind, ())))
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
