"""The first bad commit, by halving in a worktree of its own; the first bad release of a package.

    bad fails, as often as tells its rate  ->  good passes
      ->  git proposes the commit in the middle: it fails, passes, or is unresolved (skipped)
      ->  the passes that the end rests on are asked again  ->  one commit, or the suspects

A commit is checked out where a run is due: answers are kept, so a search that goes on costs nothing
until it gets to what is new. Commits with the same files are the same question. A commit that fails
once is bad for good. If a pass that the end rests on is taken back, the search starts again, with
all that is known. It rests on what every bisection does: from the first bad commit on, all are bad.

The built-in program runs under the harness of the commit (`python -m harness rerun`, with the
worktree first on `PYTHONPATH`); a commit that cannot read the case is skipped. Somebody's program
runs under this harness, with its paths in the checkout. The user's checkout, its index and a
bisection that was begun there stay as they are; the worktree lies in the folder of the search.

Releases are halved between one that passes and one that fails; the reference stays as it was.
"""

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from harness.bisect.differences import config_of, leaves_of, program_in
from harness.bisect.experiments import (
    EVERY_RUN,
    FAILS,
    PASSES,
    UNRESOLVED,
    Answer,
    Asker,
    NeverFails,
    OutOfBudget,
    Questions,
    RepeatPolicy,
    Reply,
    brief,
    failure_of,
    learn,
    question_case,
)
from harness.checks.evidence import count
from harness.codec import Json
from harness.engine.process import die_with_parent
from harness.errors import Interrupted, UsageError, one_line, shown
from harness.program.launch import make_environments
from harness.program.packages import releases
from harness.program.spec import program_of
from harness.records import CaseSpec, ExitCode, RunSpec, Verdict
from harness.repeats import FIRST_REPEAT
from harness.store import LEGS
from harness.store.files import make_folder, read_tail
from harness.store.verify import unused

TIMEOUT_S, GRACE_S, HASH_CHARS = 120.0, 10.0, 10
MAX_ANSWER_BYTES, TAIL_BYTES = 1 << 24, 4096
OF_HOOKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")
OF_COMMITS = "commit-"
"""Begins the key of every question about a commit."""
WORKTREE = "worktree"
"""Of the folder of a search: where commits are checked out while it is at it."""


class Git:
    """git in one folder, with its errors in one line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *arguments: str, legal: Sequence[int] = (0,)) -> str:
        """What git prints (`UsageError`: it is not there, says no, or does not end)."""
        kept = {name: value for name, value in os.environ.items() if name not in OF_HOOKS}
        # No hooks: those of the user's checkout are not for this one.
        command = ["git", "-C", str(self.folder), "-c", f"core.hooksPath={os.devnull}", *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S,
                env=kept | {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}, stdin=subprocess.DEVNULL,
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

    def resolve(self, name: str) -> str:
        """The full hash of a commit (`UsageError`: there is none)."""
        options = ("--verify", "--quiet", "--end-of-options")
        try:
            return self("rev-parse", *options, f"{name}^{{commit}}")
        except UsageError:
            said = f"--commits: expected a commit of {self.folder}, got {shown(name)}"
            raise UsageError(said) from None


@contextmanager
def worktree(root: Path, commit: str, place: Path) -> Iterator[Git]:
    """A detached worktree of the repository at `root`, removed whatever happens.

    One that is at `place` is of a search that was killed, as whoever asks holds its folder.
    """
    git = Git(root)

    def remove() -> None:
        # By hand: git refuses to remove what holds submodules, or what is half made.
        shutil.rmtree(place, ignore_errors=True)
        with suppress(UsageError):
            git("worktree", "prune")

    remove()
    make_folder(place.parent)
    try:
        git("worktree", "add", "--quiet", "--detach", str(place.absolute()), commit)
        yield Git(place.absolute())
    finally:
        remove()


@dataclass(frozen=True, kw_only=True)
class Commit(Json):
    """A commit as people name it; of a release its version, and no subject."""

    hash: str
    subject: str = ""

    def __str__(self) -> str:
        """Short hash and subject."""
        return f"{self.hash[:HASH_CHARS]} {self.subject}" if self.subject else self.hash


@dataclass(frozen=True, kw_only=True)
class CommitSearch(Json):
    """What a search among commits, or releases, has found.

    Attributes:
        first_bad: None if it is not known which of the suspects.
        suspects: that may be the first bad commit, the newest first.
        skipped: commits of the range that gave no verdict.
        num_commits: that could be the first bad one at the beginning.
        num_runs: tries of commits, of this and earlier sittings.
        kind: what they are: `commit`, `release of toy`.
        policy, notes: how many passes were asked for, and why; what else one should know.
        stopped: why the search ended before its end, or "".
    """

    first_bad: Commit | None
    suspects: tuple[Commit, ...]
    skipped: tuple[Commit, ...]
    good: Commit
    bad: Commit
    num_commits: int
    num_runs: int
    kind: str = "commit"
    policy: str = ""
    notes: tuple[str, ...] = ()
    stopped: str = ""

    def __str__(self) -> str:
        """One line."""
        cost = f"asked {count(self.num_runs, 'time')}, of {self.num_commits}"
        if self.first_bad is not None:
            return f"first bad {self.kind}: {self.first_bad} ({cost})"
        why = self.stopped or f"{len(self.skipped)} gave no verdict"
        return (
            f"first bad {self.kind}: one of {len(self.suspects)}, from {self.suspects[-1]} to "
            f"{self.suspects[0]} ({why}; {cost})"
        )


class Commits:
    """Commits `good..bad` of the repository around `root`; `paths` decide an answer, or all files.

    Raises:
        UsageError: no repository, no range, no such commit, or bad does not descend from good.
    """

    kind, option = "commit", "--commits"

    def __init__(self, root: Path, commits: str, paths: Sequence[str] = ()) -> None:
        good, dots, bad = commits.partition("..")
        if not good or not dots or bad.startswith(".") or good.startswith("-"):
            raise UsageError(f"--commits: expected GOOD..BAD, got {shown(commits)}")
        self.root = Path(Git(root)("rev-parse", "--show-toplevel"))
        self._git, self._paths = Git(self.root), tuple(paths)
        self.good, self.bad = self._git.resolve(good), self._git.resolve(bad or "HEAD")
        is_older = self._git("merge-base", self.good, self.bad, legal=(0, 1)) == self.good
        if self.good == self.bad or not is_older:
            raise UsageError(
                "--commits: expected a good commit that the bad one descends from, got "
                f"{shown(commits)}"
            )
        self._known: dict[str, tuple[str, str]] = {}
        for end in ((self.bad, f"^{self.good}"), ("--no-walk", self.good)):
            for line in self._git("log", "--format=%H %T %s", *end, "--").splitlines():
                commit, tree, subject = line.split(" ", 2)
                self._known[commit] = tree, subject

    def named(self, name: str) -> Commit:
        """Hash and subject."""
        return Commit(hash=name, subject=self._known[name][1])

    def key(self, name: str) -> str:
        """Of its files."""
        if not self._paths:
            return f"{OF_COMMITS}{self._known[name][0]}"
        listed = self._git("ls-tree", name, "--", *self._paths)
        return f"{OF_COMMITS}{hashlib.sha256(listed.encode()).hexdigest()[:40]}"

    def between(self, bad: str, goods: Sequence[str], how: str = "--topo-order") -> list[str]:
        """What `git bisect` would choose from."""
        lines = self._git("rev-list", how, bad, "--not", *goods, "--").splitlines()
        return [line.split()[0] for line in lines]

    def best(self, bad: str, goods: Sequence[str]) -> list[str]:
        """As many suspects come before the first as after it."""
        return self.between(bad, goods, "--bisect-all")

    def newest(self, goods: Sequence[str]) -> list[str]:
        """Those that no other descends from."""
        return self._git("merge-base", "--independent", *goods).split()


class Releases:
    """Releases `A..B` of a package, A the good one."""

    option = "--package"

    def __init__(self, package: str, versions: Sequence[str]) -> None:
        self.kind, self._versions = f"release of {package}", list(versions)
        self.good, self.bad = versions[0], versions[-1]

    def named(self, name: str) -> Commit:
        """Its version."""
        return Commit(hash=name)

    def key(self, name: str) -> str:
        """Of its version."""
        return f"release-{hashlib.sha256(f'{self.kind} {name}'.encode()).hexdigest()[:40]}"

    def between(self, bad: str, goods: Sequence[str]) -> list[str]:
        """Those after the newest good one."""
        first = max(map(self._versions.index, goods)) + 1
        return self._versions[first : self._versions.index(bad) + 1][::-1]

    def best(self, bad: str, goods: Sequence[str]) -> list[str]:
        """From the middle outwards."""
        left = self.between(bad, goods)
        return sorted(left, key=lambda name: abs(2 * left.index(name) - len(left)))

    def newest(self, goods: Sequence[str]) -> list[str]:
        """The last of them."""
        return [max(goods, key=self._versions.index)]


def find_first_bad(
    history: Commits | Releases, run: Callable[[str, int], Reply], questions: Questions,
    *, policy: RepeatPolicy | None = None, cost: int = 1,
) -> CommitSearch:  # fmt: skip
    """Search a history for the first commit on which a run fails.

    Args:
        history: the commits.
        run: makes one run of a commit, which so many were made of before.
        questions: keeps the answers, and has the budget.
        policy: how many passes count; None to learn it from the bad commit.
        cost: of one run, for the budget: a case is three runs.

    Raises:
        UsageError: git says no, good does not pass, bad does not fail.
        OutOfBudget: `best` is a `CommitSearch` of what was found.
    """
    return _Search(history, run, questions, cost).find(policy)


class _Search:
    def __init__(
        self,
        history: Commits | Releases,
        run: Callable[[str, int], Reply],
        questions: Questions,
        cost: int,
    ) -> None:
        self._history, self._run, self._questions = history, run, questions
        self._good, self._bad, self._cost = history.good, history.bad, cost
        self._suspects = history.between(self._bad, [self._good])
        self._num_commits, self._num_runs = len(self._suspects), 0
        self._answers: dict[str, list[Answer]] = {}
        self._skipped: list[str] = []
        self._policy, self._notes = EVERY_RUN, list[str]()

    def find(self, policy: RepeatPolicy | None) -> CommitSearch:
        named = self._history.named
        try:
            self._learn(policy)
            if (answer := self._answer(self._good, self._policy.passes)) != PASSES:
                raise self._not_good(answer)
            while (lucky := self._bisect()) is not None:
                self._notes.append(f"{named(lucky)}: passed at first and failed when asked again")
                if lucky == self._good:
                    raise self._not_good(FAILS)
                self._learn(None, flaky=True)
            return self._found()
        except OutOfBudget as error:
            error.best = replace(self._found(), first_bad=None, stopped=str(error))
            raise

    def _ask(self, name: str, attempt: int) -> Answer:
        """One run, which may be known already."""
        key = self._history.key(name)
        answers = self._answers.setdefault(key, [])
        if attempt < len(answers):
            return answers[attempt]
        again = f" (run {attempt + 1})" if attempt else ""
        words = f"does {self._history.named(name)} fail?{again}"
        reply = self._questions.pay(
            f"{key}-{attempt}", words, self._cost, lambda: self._run(name, attempt)
        )
        self._num_runs += 1
        answers.append(reply.answer)
        return answers[-1]

    def _answer(self, name: str, passes: int) -> Answer:
        """Fails once it has failed, passes after so many runs; all runs so far count."""
        known = self._answers.get(self._history.key(name), [])
        for number in range(max(passes, len(known))):
            if (answer := self._ask(name, number)) != PASSES:
                return answer
        return PASSES

    def _learn(self, policy: RepeatPolicy | None, *, flaky: bool = False) -> None:
        history = self._history
        said = f"{history.option}: expected a bad end that fails, got {history.named(self._bad)}"
        # Halvings, both ends, and what skips may add.
        num_questions = math.ceil(math.log2(self._num_commits + 1)) + 2
        if policy is not None:
            if self._answer(self._bad, policy.passes) != FAILS:
                raise UsageError(said)
            if policy != EVERY_RUN:
                policy = RepeatPolicy.of(policy.failures, policy.trials, num_questions)
            self._policy = policy
            return
        try:
            self._policy = learn(
                partial(self._ask, self._bad), num_questions=num_questions, flaky=flaky
            )
        except NeverFails as error:
            raise UsageError(f"{said}: {error}") from error

    def _not_good(self, answer: Answer) -> UsageError:
        how = "that can be run" if answer == UNRESOLVED else "that passes"
        told = "" if answer == UNRESOLVED else ", which fails: name an older one"
        good = self._history.named(self._good)
        return UsageError(f"{self._history.option}: expected a good end {how}, got {good}{told}")

    def _bisect(self) -> str | None:
        """Halve until one suspect is left, or only skipped ones; a pass that was luck, if any."""
        bad, goods = self._bad, [self._good]
        while True:
            self._suspects = self._history.between(bad, goods)
            best = self._history.best(bad, goods)
            name = next((c for c in best if c != bad and c not in self._skipped), None)
            if name is None:
                break
            answer = self._answer(name, self._policy.passes)
            if answer == FAILS:
                bad = name
            elif answer == PASSES:
                goods.append(name)
            else:
                self._skipped.append(name)
        newest, sure = self._history.newest(goods), self._policy.confirmations
        return next((name for name in newest if self._answer(name, sure) != PASSES), None)

    def _found(self) -> CommitSearch:
        named = self._history.named
        suspects = tuple(map(named, self._suspects))
        return CommitSearch(
            first_bad=suspects[0] if len(suspects) == 1 else None, suspects=suspects,
            skipped=tuple(map(named, sorted(self._skipped))), good=named(self._good),
            bad=named(self._bad), num_commits=self._num_commits, num_runs=self._num_runs,
            kind=self._history.kind, notes=tuple(self._notes),
            policy="one run each" if self._policy == EVERY_RUN else str(self._policy),
        )  # fmt: skip


# --- runs at a commit --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """One try of one commit: its full hash, and how many tries there were before.

    `folder` is a worktree with its files; nothing of the user's `repository` must come into a run.
    """

    folder: Path
    repository: Path
    commit: str
    attempt: int


Run = Callable[[Checkout], Reply]
"""Makes one run; its reply has an answer."""


def first_bad_commit(
    history: Commits, run: Run, questions: Questions, place: Path, **how: Any
) -> CommitSearch:
    """As `find_first_bad`, with each commit checked out in a worktree at `place`."""
    with worktree(history.root, history.bad, place) as git:

        def in_checkout(commit: str, attempt: int) -> Reply:
            # No file of another commit stays, nor a compiled module.
            git("checkout", "--quiet", "--force", "--detach", commit)
            git("clean", "-ffdxq")
            return run(
                Checkout(folder=git.folder, repository=history.root, commit=commit, attempt=attempt)
            )

        return find_first_bad(history, in_checkout, questions, **how)


# --- with the harness of the commit ----------------------------------------------------------


def case_run(place: Path, verdict: Verdict, folder: Path, room: Sequence[str] = ()) -> Run:
    """Runs a case folder's case again, with the harness of the commit.

    Args:
        place: case folder.
        verdict: of the failure that is searched for; whatever else a run does is no verdict.
        folder: gets a run folder a run.
        room: further options of `harness rerun`.
    """

    def run(checkout: Checkout) -> Reply:
        lacking = [name for name in PACKAGES if not (checkout.folder / name).is_dir()]
        if lacking:  # an installed one would run in its place
            return Reply(answer=UNRESOLVED, words=f"no verdict: it has no {lacking[0]}")
        make_folder(folder)
        name = f"{checkout.commit[:HASH_CHARS]}-{checkout.attempt}"
        out = unused(folder / name).absolute()
        log, answers = folder / f"{name}.log", folder / f"{name}.json"
        command = (
            *(sys.executable, "-m", "harness", "rerun", str(place.absolute())),
            *("--out", str(out), "--json", "--no-history", *room),
        )
        # Where we are, for paths of the case; the interpreter does not look there for modules.
        env = python_environment(checkout) | {"PYTHONSAFEPATH": "1"}
        try:
            code = _run(command, log, env, answers)
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
        if code in (ExitCode.INTERRUPTED, -signal.SIGINT, -signal.SIGTERM):
            raise Interrupted(f"interrupted at {checkout.commit[:HASH_CHARS]}")
        return _judged(code, answers, log, verdict)

    return run


PACKAGES = ("fsdp_core", "harness")


def python_environment(checkout: Checkout) -> dict[str, str]:
    """Of a run whose modules are the commit's, and none of the user's checkout."""
    others = [
        entry
        for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if entry and not Path(entry).absolute().is_relative_to(checkout.repository)
    ]
    # What git sets for its hooks would make each git of the run that of the user's checkout.
    kept = {name: value for name, value in os.environ.items() if name not in OF_HOOKS}
    return kept | {"PYTHONPATH": os.pathsep.join([str(checkout.folder), *others])}


def _judged(code: int, answers: Path, log: Path, wanted: Verdict) -> Reply:
    """What the command has printed: other commits have other fields, these are as old as it is."""
    try:
        (plain,) = json.loads(read_tail(answers, MAX_ANSWER_BYTES))["verdicts"]
        outcome, what, message = (str(plain[name]) for name in ("outcome", "what", "message"))
        ending = plain.get("ending") or {}
        same = same_end(wanted, str(ending.get("exception", "")), str(ending.get("signal", "")))
    except (ValueError, KeyError, TypeError, AttributeError):
        lines = read_tail(log, TAIL_BYTES).decode(errors="replace").strip().splitlines()
        said = f"exit code {code} {lines[-1][:200] if lines else ''}".strip()
        return Reply(answer=UNRESOLVED, words=one_line(f"no verdict: {said}"))
    if outcome == "passed" and code == ExitCode.PASSED:
        return Reply(answer=PASSES, words=outcome)
    due = ExitCode.FAILED if outcome == "failed" else ExitCode.NO_VERDICT
    if same and code == due and (outcome, what) == (wanted.outcome, wanted.what):
        return Reply(answer=FAILS, words=one_line(f"{outcome} {what}".strip()))
    words = f"no verdict: {outcome} {what} {message}"
    return Reply(answer=UNRESOLVED, words=one_line(words.strip()))


def same_end(wanted: Verdict, exception: str, signal_name: str) -> bool:
    """Whether a run that crashed was ended by the same exception or signal."""
    if wanted.what != "crashed" or wanted.ending is None:
        return True
    return (wanted.ending.exception, wanted.ending.signal) == (exception, signal_name)


def _run(command: Sequence[str], log: Path, env: Mapping[str, str], stdout: Path) -> int:
    """Its exit code; whatever it has started ends with it."""
    with log.open("ab") as said, stdout.open("wb") as answers:
        process = subprocess.Popen(
            command, cwd=Path.cwd(), env=dict(env), stdin=subprocess.DEVNULL, stderr=said,
            stdout=answers, start_new_session=True,
            # Killed without a word, we leave nobody at work in a worktree that goes away.
            preexec_fn=partial(die_with_parent, os.getpid()),
        )  # fmt: skip
        try:
            return process.wait()
        finally:
            with suppress(ProcessLookupError, PermissionError):
                if process.poll() is None:
                    # Asked first, so that a harness keeps what it has.
                    os.killpg(process.pid, signal.SIGINT)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(GRACE_S)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# --- with the program of the commit ----------------------------------------------------------


def commit_run(case: CaseSpec, verdict: Verdict, asker: Asker, top: Path) -> Run:
    """Runs the case with the program of a commit, under this harness; `top` is its repository."""
    failure, asker = failure_of(verdict), asker.unaccounted()

    def run(checkout: Checkout) -> Reply:
        legs: dict[str, Any] = {leg: at_commit(getattr(case, leg), checkout, top) for leg in LEGS}
        program = program_in(legs["candidate"])
        if program.kind == "script" and not Path(program.target).is_file():
            return Reply(answer=UNRESOLVED, words="no verdict: the script is not in this commit")
        if checkout.attempt:
            number = FIRST_REPEAT + checkout.attempt
            legs["candidate"] = replace(legs["candidate"], replica=number)
        question = replace(
            case, id=f"commit-{legs['candidate'].key}", labels={"question": "commits"}, repeats=0,
            skip_reason="", **legs,
        )  # fmt: skip
        found = asker.ask(question, "").verdict
        answer, end = failure.answer(found), found.ending
        if answer == FAILS and not same_end(
            verdict, end.exception if end else "", end.signal if end else ""
        ):
            answer = UNRESOLVED
        return Reply(answer=answer, words=brief(found))

    return run


def at_commit(spec: RunSpec, checkout: Checkout, top: Path) -> RunSpec:
    """The run with the paths of a checkout; the commit makes it another run than the last one.

    So are arguments that name a file of the repository `top`, or with a slash a folder of it, from
    where we are, if the commit has it: what it lacks, as data that git ignores, stays the user's.
    """

    def moved(path: str) -> str:
        inside = Path(path).is_absolute() and Path(path).is_relative_to(top)
        return str(checkout.folder / Path(path).relative_to(top)) if inside else path

    def argument(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [argument(each) for each in value]
        if not isinstance(value, str) or not value or "\0" in value:
            return value
        named = Path(value).resolve()
        there = Path(moved(str(named)))
        is_kept = there == named or not (named.is_file() or (os.sep in value and named.is_dir()))
        return value if is_kept or not there.exists() else str(there)

    program = dict(spec.config["program"])
    program |= {name: moved(program[name]) for name in ("target", "folder")}
    program["args"] = {name: argument(value) for name, value in program["args"].items()}
    return replace(spec, config=spec.config | {"program": program, "commit": checkout.commit})


# --- releases of a package -------------------------------------------------------------------


def find_release(
    case: CaseSpec, verdict: Verdict, package: str, ends: str, asker: Asker,
    *, policy: RepeatPolicy | None = None,
) -> CommitSearch:  # fmt: skip
    """Search the releases `A..B` of a package for the first bad one; the reference stays.

    Where A fails and B passes, the last bad one is searched for, from B backwards.

    Raises:
        UsageError: no such range, package or release, or both ends answer alike.
        OutOfBudget: what was asked is kept.
    """
    versions, failure, silent = published(package, ends), failure_of(verdict), asker.unaccounted()

    def run(version: str, attempt: int) -> Reply:
        leaves = leaves_of(case.candidate.config) | {f"packages.{package}": version}
        candidate = replace(case.candidate, config=config_of(leaves))
        try:
            make_environments(filter(None, [program_of(candidate.config)]), lambda _: None)
        except UsageError as error:
            return Reply(answer=UNRESOLVED, words=one_line(f"no verdict: {error}"))
        found = silent.ask(question_case(case, failure, candidate, repeat=attempt), "").verdict
        return Reply(answer=failure.answer(found), words=brief(found))

    search = partial(find_first_bad, run=run, questions=asker.questions, policy=policy)
    try:
        return search(Releases(package, versions))
    except UsageError:
        found = search(Releases(package, versions[::-1]))
        return replace(found, notes=(*found.notes, "older releases fail, newer ones pass"))


def published(package: str, ends: str) -> list[str]:
    """The releases `A..B` of a package, the oldest first (`UsageError`: none such)."""
    first, dots, last = ends.partition("..")
    if not first or not dots or not last or last.startswith("."):
        raise UsageError(f"--package: expected NAME A..B, got {shown(ends)}")
    return releases(package, first, last, Path(sys.executable))
