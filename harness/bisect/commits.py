"""The first bad commit, by `git bisect` in a temporary worktree; the first bad release.

    bad fails, often enough that its rate is known  ->  good passes
      ->  git bisect proposes a commit, runs answer: fails, passes, or unresolved (skipped)
      ->  the passes that the end rests on are asked again  ->  one commit, or the suspects

git only chooses (`bisect start --no-checkout`): commits are checked out where a run is due, so a
search that goes on from its kept answers costs nothing until it gets to what is new. Commits with
the same files are the same question. A commit that fails once is bad for good; one that passes does
so as often as `chance` asks for. If a pass that the end rests on is taken back, the search starts
again, with all that is known. What it rests on is what every bisection does: from the first bad
commit on, all are bad.

The user's checkout, its index and a bisection that the user has begun stay as they are: a worktree
has its own `HEAD`, and its own `refs/bisect`. It goes away with its maker.

Releases are halved between one that passes and one that fails; the reference stays as it was. One
that cannot be installed, or fails in another way, gives no verdict and is passed over.
"""

import hashlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from harness.bisect.chance import (
    FAILS,
    PASSES,
    UNRESOLVED,
    Answer,
    NeverFails,
    Patience,
    learn,
    patience,
)
from harness.bisect.differences import config_of, leaves_of
from harness.bisect.experiments import Asker, Judged, OutOfBudget, Questions, Reply, failure_of
from harness.checks.evidence import count
from harness.codec import Json
from harness.errors import Infrastructure, UsageError, shown
from harness.program.launch import make_environments
from harness.program.packages import releases
from harness.program.spec import program_of
from harness.records import CaseSpec, Verdict
from harness.store.files import FolderLock

TIMEOUT_S = 120.0
PREFIX = "bisect-commits-"
GIVEN_UP_S = 60.0
"""Between the making of a folder and that of the worktree in it are milliseconds."""
OF_HOOKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")


class Git:
    """git in one folder, with its errors in one line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *arguments: str, legal: Sequence[int] = (0,)) -> str:
        """What git prints.

        Args:
            arguments: after `git -C FOLDER`.
            legal: exit codes that are no error.

        Raises:
            UsageError: git is not there, says no, or does not end.
        """
        kept = {name: value for name, value in os.environ.items() if name not in OF_HOOKS}
        # No hooks: those of the user's checkout are not for this one.
        command = ["git", "-C", str(self.folder), "-c", f"core.hooksPath={os.devnull}", *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S,
                env=kept | {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_EDITOR": "true"},
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except FileNotFoundError:
            raise UsageError("searching commits takes git, which is not on PATH") from None
        except subprocess.TimeoutExpired:
            raise UsageError(f"git {arguments[0]} did not end in {TIMEOUT_S:g} s") from None
        if done.returncode not in legal:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["nothing"]
            # The first line says what is wrong; what follows is advice.
            raise UsageError(f"git {arguments[0]} in {self.folder}: {said[0]}")
        return done.stdout.rstrip("\n")

    def check_out(self, commit: str) -> None:
        """The files of a commit, and no others: no compiled module of another commit stays behind.

        Raises:
            UsageError: git says no.
        """
        self("checkout", "--quiet", "--force", "--detach", commit)
        self("clean", "-ffdxq")

    def resolve(self, name: str) -> str:
        """The full hash of a commit.

        Raises:
            UsageError: there is no such commit.
        """
        try:
            return self(
                "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"
            )
        except UsageError:
            raise UsageError(
                f"--commits: expected a commit of {self.folder}, got {shown(name)}"
            ) from None


@contextmanager
def temporary_worktree(root: Path, commit: str) -> Iterator[Git]:
    """A detached worktree of the repository at `root`, removed whatever happens.

    Raises:
        UsageError: git says no.
    """
    git = Git(root)
    _remove_abandoned(git)
    holder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = FolderLock(holder / "lock")
    try:
        lock.acquire()
        place = holder / "worktree"
        git("worktree", "add", "--quiet", "--detach", str(place), commit)
        yield Git(place)
    finally:
        _remove(git, holder)
        lock.release()


def _remove(git: Git, holder: Path) -> None:
    # By hand: git refuses to remove what holds submodules, or what is half made.
    shutil.rmtree(holder, ignore_errors=True)
    with suppress(UsageError):
        git("worktree", "prune")


def _remove_abandoned(git: Git) -> None:
    """Worktrees whose makers were killed; the lock of one that works is held."""
    lines = git("worktree", "list", "--porcelain").splitlines()
    trees = [Path(line.removeprefix("worktree ")) for line in lines if line.startswith("worktree ")]
    holders = [tree.parent for tree in trees if tree.parent.name.startswith(PREFIX)]
    for holder in dict.fromkeys((*holders, *_unused())):
        lock = FolderLock(holder / "lock")
        with suppress(UsageError, Infrastructure):
            if holder.is_dir():
                lock.acquire()
            _remove(git, holder)
            lock.release()


def _unused() -> Iterator[Path]:
    """Folders whose makers were killed before git knew of them; not of one that is at it now."""
    for holder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            now_unix_s = time.time()
            is_old = now_unix_s - holder.stat().st_mtime > GIVEN_UP_S
            if is_old and not (holder / "worktree").exists():
                yield holder


# --- a range, and what is run of it --------------------------------------------------------------


HASH_CHARS = 10
LEFT_OUT, PUT_IN = "left_out", "put_in"
"""Of a reply's detail: settings of a case that the commit did not know, and that it alone knew."""


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
    top = Path(Git(where.root)("rev-parse", "--show-toplevel"))
    good, bad = (Git(top).resolve(end) for end in parse_range(where.commits))
    if good == bad or Git(top)("merge-base", good, bad, legal=(0, 1)) != good:
        raise UsageError(
            "--commits: expected a good commit that the bad one descends from, got "
            f"{shown(where.commits)}"
        )
    return top, good, bad


OF_COMMITS = "commit-"
"""Begins the key of every question about a commit."""


# --- the search ----------------------------------------------------------------------------------


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
    questions: Questions,
    *,
    once: bool = False,
    known: Patience | None = None,
    cost: int = 1,
) -> CommitSearch:
    """Search a range of commits for the first on which a run fails.

    Args:
        where: the commits.
        run: makes one run in a checkout.
        questions: keeps the answers, and has the budget.
        once: the fault is known to fire in every run: one run a commit, and no more.
        known: how often the case has failed as it is here, where here is the bad commit: that it
            fails there is seen once more, and its rate is taken from this.
        cost: of one run, for the budget: a case is three runs.

    Raises:
        UsageError: git says no, good does not pass, bad does not fail.
        OutOfBudget: `best` is a `CommitSearch` of what was found.
    """
    top, good, bad = resolve_range(where)
    with temporary_worktree(top, bad) as git:
        return _Search(
            git, replace(where, root=top), (good, bad), run, questions,
            once=once, known=known, cost=cost,
        ).find()  # fmt: skip


class _Search:
    """One search: each commit is checked out where a run of it is due, and asked once."""

    def __init__(
        self, git: Git, where: CommitRange, ends: tuple[str, str], run: Run, questions: Questions,
        *, once: bool, known: Patience | None, cost: int,
    ) -> None:  # fmt: skip
        self._git, self._where, self._run, self._questions = git, where, run, questions
        self._good, self._bad = ends
        self._once, self._known, self._cost = once, known, cost
        self._files: dict[str, str] = {}
        self._subjects: dict[str, str] = {}
        self._read()
        self._suspects = self._between(self._bad, [self._good])
        self._num_commits, self._num_runs = len(self._suspects), 0
        self._answers: dict[str, list[Answer]] = {}
        self._settings: dict[str, dict[str, None]] = {LEFT_OUT: {}, PUT_IN: {}}
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
                    f"{self._words(lucky)}: passed at first and failed when asked again"
                )
                if lucky == self._good:
                    raise self._good_fails()
                self._learn(flaky=True)
        except OutOfBudget as error:
            error.best = replace(self._found(), first_bad=None, stopped=str(error))
            raise

    # --- one commit

    def _read(self) -> None:
        """Look up files and subjects of all commits at once."""
        for ends in ((self._bad, f"^{self._good}"), ("--no-walk", self._good)):
            for line in self._git("log", "--format=%H %T %s", *ends, "--").splitlines():
                commit, tree, subject = line.split(" ", 2)
                self._subjects[commit] = subject
                if not self._where.paths:
                    self._files[commit] = tree

    def _files_of(self, commit: str) -> str:
        """The same for commits whose files are the same."""
        if commit not in self._files:
            listed = self._git("ls-tree", commit, "--", *self._where.paths)
            self._files[commit] = hashlib.sha256(listed.encode()).hexdigest()[:40]
        return self._files[commit]

    def _words(self, commit: str) -> Commit:
        return Commit(hash=commit, subject=self._subjects[commit])

    def _between(self, bad: str, goods: Sequence[str]) -> list[str]:
        """What may be the first bad commit, the newest first."""
        return self._git("rev-list", "--topo-order", bad, "--not", *goods, "--").split()

    def _ask(self, commit: str, attempt: int) -> Answer:
        """One run, which may be known already."""
        files = self._files_of(commit)
        answers = self._answers.setdefault(files, [])
        if attempt < len(answers):
            return answers[attempt]
        told = self._words(commit)
        again = f" (run {attempt + 1})" if attempt else ""

        def find_out() -> Reply:
            self._git.check_out(commit)
            return self._run(
                Checkout(
                    folder=self._git.folder, repository=self._where.root, commit=commit,
                    attempt=attempt,
                )
            )  # fmt: skip

        key = f"{OF_COMMITS}{files}-{attempt}"
        reply = self._questions.pay(key, f"does {told} fail?{again}", self._cost, find_out)
        for kind, settings in self._settings.items():
            settings |= dict.fromkeys(map(str, reply.detail.get(kind, ())))
        answer: Answer = reply.answer or UNRESOLVED
        self._num_runs += 1
        answers.append(answer)
        return answer

    def _answer(self, commit: str, passes: int) -> Answer:
        """Fails once it has failed, passes after so many runs; all runs so far count."""
        known = self._answers.get(self._files_of(commit), [])
        for number in range(max(passes, len(known))):
            if (answer := self._ask(commit, number)) != PASSES:
                return answer
        return PASSES

    # --- the ends of the range

    def _learn(self, *, flaky: bool) -> None:
        said = f"--commits: expected a bad commit that fails, got {self._words(self._bad)}"
        if self._once:
            if self._answer(self._bad, 1) != FAILS:
                raise UsageError(said)
            return
        # Halvings, both ends, and what skips may add.
        num_questions = math.ceil(math.log2(self._num_commits + 1)) + 2
        if self._known is not None and not flaky and self._ask(self._bad, 0) == FAILS:
            self._patience = patience(
                self._known.failures, self._known.trials, num_questions=num_questions
            )
        else:
            try:
                self._patience = learn(
                    lambda attempt: self._ask(self._bad, attempt),
                    num_questions=num_questions, flaky=flaky,
                )  # fmt: skip
            except NeverFails as error:
                raise UsageError(f"{said}: {error}") from error

    def _see_good_pass(self) -> None:
        passes = 1 if self._patience is None else self._patience.passes
        answer = self._answer(self._good, passes)
        if answer == FAILS:
            raise self._good_fails()
        if answer == UNRESOLVED:
            good = self._words(self._good)
            raise UsageError(f"--commits: expected a good commit that can be run, got {good}")

    def _good_fails(self) -> UsageError:
        return UsageError(
            f"--commits: expected a good commit that passes, got {self._words(self._good)}, which "
            "fails: name an older one"
        )

    # --- between them

    def _bisect(self) -> list[str]:
        """Let git choose until it has one, or only skipped ones; the good commits."""
        git, bad, goods = self._git, self._bad, [self._good]
        passes = 1 if self._patience is None else self._patience.passes
        git("bisect", "reset", legal=(0, 1))
        git("bisect", "start", "--no-checkout", bad, self._good)
        self._suspects = self._between(bad, goods)
        while not set(self._suspects) - {bad} <= self._skipped:
            commit = git("rev-parse", "--verify", "BISECT_HEAD")
            assert commit in self._suspects, f"git asks for {commit}, which is settled"
            answer = self._answer(commit, passes)
            if answer == FAILS:
                bad = commit
            elif answer == PASSES:
                goods.append(commit)
            else:
                self._skipped.add(commit)
            term = {FAILS: "bad", PASSES: "good", UNRESOLVED: "skip"}[answer]
            # 2: only skipped commits are left.
            git("bisect", term, commit, legal=(0, 2))
            self._suspects = self._between(bad, goods)
        return goods

    def _boundary(self, goods: Sequence[str]) -> list[str]:
        """The good commits that the suspects stand on; all others that are good are older."""
        git = self._git
        parents = {p for c in self._suspects for p in git("rev-parse", f"{c}^@").split()}
        return [
            commit
            for commit in goods
            if any(git("merge-base", parent, commit, legal=(0, 1)) == parent for parent in parents)
        ]

    def _stands(self, commit: str) -> bool:
        passes = 1 if self._patience is None else self._patience.confirmations
        return self._answer(commit, passes) == PASSES

    def _found(self) -> CommitSearch:
        suspects = tuple(map(self._words, self._suspects))
        left_out, put_in = (", ".join(self._settings[kind]) for kind in (LEFT_OUT, PUT_IN))
        notes = {
            "settings that not every commit knows are left out there, at their defaults": left_out,
            "settings that only some commits know are at their defaults there": put_in,
        }
        return CommitSearch(
            first_bad=suspects[0] if len(suspects) == 1 else None, suspects=suspects,
            skipped=tuple(map(self._words, sorted(self._skipped))),
            good=self._words(self._good), bad=self._words(self._bad),
            num_commits=self._num_commits, num_runs=self._num_runs,
            patience="one run a commit" if self._patience is None else str(self._patience),
            notes=(*self._notes, *(f"{words}: {names}" for words, names in notes.items() if names)),
        )  # fmt: skip


# --- releases of a package -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReleaseSearch(Json):
    """What a search among releases has found.

    Attributes:
        package: its name.
        first, last: ends of the range.
        older, newer: releases next to each other, as far as they were asked, of which one passes
            and one fails; "" where both ends of the range answer alike.
        older_answer, newer_answer: of these; of the ends where they answer alike.
        skipped: releases between the two that gave no verdict.
        num_releases: in the range.
    """

    package: str
    first: str
    last: str
    older: str = ""
    newer: str = ""
    older_answer: Answer = UNRESOLVED
    newer_answer: Answer = UNRESOLVED
    skipped: tuple[str, ...] = ()
    num_releases: int = 0

    def __str__(self) -> str:
        """For people: `first bad release: toy 1.3; last good: 1.2 (of 6 releases)`."""
        of = f"of {count(self.num_releases, 'release')}"
        if not self.older:
            ends = f"{self.package} {self.first} and {self.last}"
            if UNRESOLVED in (self.older_answer, self.newer_answer):
                return f"no release found: {ends}: {self.older_answer}, {self.newer_answer} ({of})"
            word = _release_word(self.older_answer)
            return f"all are {word}: {ends} ({of}; those between not asked)"
        between = f"; no verdict between: {', '.join(self.skipped)}" if self.skipped else ""
        new, old = _release_word(self.newer_answer), _release_word(self.older_answer)
        return (
            f"first {new} release: {self.package} {self.newer}; last {old}: {self.older} "
            f"({of}{between})"
        )


def _release_word(answer: Answer) -> str:
    return "bad" if answer == FAILS else "good"


def find_release(
    case: CaseSpec, verdict: Verdict, package: str, ends: str, asker: Asker,
    *, patience: Patience | None = None,
) -> ReleaseSearch:  # fmt: skip
    """Search the releases `A..B` of a package for that from which on a case fails, or passes.

    Raises:
        UsageError: no such range, package or release.
        OutOfBudget: what was asked is kept.
    """
    versions = published(package, ends)
    judged = Judged(case, failure_of(verdict), asker, verdict)
    judged.patience = patience

    def ask(version: str) -> Answer:
        leaves = leaves_of(case.candidate.config) | {f"packages.{package}": version}
        candidate = replace(case.candidate, config=config_of(leaves))
        try:
            make_environments(filter(None, [program_of(candidate.config)]), lambda _: None)
        except UsageError:
            return UNRESOLVED
        return judged.answer(candidate, words=f"does it fail with {package} {version}?")

    found = search_releases(versions, ask)
    first, last = versions[0], versions[-1]
    return replace(found, package=package, first=first, last=last, num_releases=len(versions))


def published(package: str, ends: str) -> list[str]:
    """The releases `A..B` of a package, the oldest first.

    Raises:
        UsageError: no such range, package or release.
    """
    first, dots, last = ends.partition("..")
    if not first or not dots or not last or last.startswith("."):
        raise UsageError(f"--package: expected NAME A..B, got {shown(ends)}")
    return releases(package, first, last, Path(sys.executable))


def search_releases(versions: Sequence[str], ask: Callable[[str], Answer]) -> ReleaseSearch:
    """Two neighbours of which one passes and one fails; versions are asked once each."""
    low, high, skipped = 0, len(versions) - 1, set[int]()
    answers = {0: ask(versions[0])}
    if high:
        answers[high] = ask(versions[high])
    plain = ReleaseSearch(
        package="", first="", last="", older_answer=answers[low], newer_answer=answers[high]
    )
    if {answers[low], answers[high]} != {FAILS, PASSES}:
        return plain
    while between := [n for n in range(low + 1, high) if n not in skipped]:
        middle = min(between, key=lambda n: abs(2 * n - low - high))
        answers[middle] = ask(versions[middle])
        if answers[middle] == answers[low]:
            low = middle
        elif answers[middle] == answers[high]:
            high = middle
        else:
            skipped.add(middle)
    passed_over = tuple(versions[n] for n in sorted(skipped) if low < n < high)
    return replace(plain, older=versions[low], newer=versions[high], skipped=passed_over)
