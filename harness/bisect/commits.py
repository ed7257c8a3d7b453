"""The first bad or first good commit, by halving in a worktree of its own, or release of a package.

    the end that fails, as often as tells its rate  ->  the other one passes
      ->  halve, skip what gives no verdict  ->  the pass that the answer rests on is asked again
      ->  one commit, or the suspects

Which end fails decides what is looked for: the older one passes and the first bad is named, or the
newer one does, and the first good. An end that gives no verdict, as a release that does not import,
is moved inwards. From there on all are alike. Commits are those of the first
parents: of a branch that was merged, the merge is named. The built-in program runs under the
harness of the commit (`python -m harness rerun`), somebody's program under this one, with its paths
in the worktree. The user's checkout and index stay as they are.
"""

import hashlib
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from harness.bisect.differences import config_of, leaves_of, program_in
from harness.bisect.experiments import (
    EVERY_RUN,
    MAX_SILENT,
    Answer,
    Asker,
    NeverFails,
    Questions,
    Reply,
    again,
    failure_of,
    learn,
    question_case,
    question_of,
)
from harness.checks.evidence import count
from harness.engine.machine import die_with_parent, kill_group
from harness.errors import Interrupted, UsageError, one_line, shown
from harness.program.packages import releases
from harness.program.spec import make_environments
from harness.provenance import PACKAGES, outside_hooks
from harness.records import CaseSpec, ExitCode, RunSpec, Verdict
from harness.store import LEGS
from harness.store.files import make_folder, read_tail
from harness.store.folder import unused
from harness.values import Json

TIMEOUT_S, GRACE_S, HASH_CHARS = 120.0, 10.0, 10
MAX_ANSWER_BYTES, TAIL_BYTES = 1 << 24, 4096
OF_COMMITS, WORKTREE = "commit-", "worktree"
"""Begins the key of every question about a commit; where commits are checked out."""


def git(folder: Path, *arguments: str, legal: Sequence[int] = (0,)) -> str:
    """What git prints in a folder (`UsageError`: it is not there, says no, or does not end)."""
    env = outside_hooks() | {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}
    # No hooks: those of the user's checkout are not for this one.
    command = ["git", "-C", str(folder), "-c", f"core.hooksPath={os.devnull}", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S,
            env=env, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except FileNotFoundError:
        raise UsageError("searching commits takes git, which is not on PATH") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"git {arguments[0]} did not end in {TIMEOUT_S:g} s") from None
    if done.returncode not in legal:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["nothing"]
        # The first line says what is wrong; what follows is advice.
        raise UsageError(f"git {arguments[0]} in {folder}: {said[0]}")
    return done.stdout.rstrip("\n")


# --- what is searched -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Commit(Json):
    """A commit as people name it; of a release its version, and no subject."""

    hash: str
    subject: str = ""

    def __str__(self) -> str:
        return f"{self.hash[:HASH_CHARS]} {self.subject}" if self.subject else self.hash


@dataclass(frozen=True, kw_only=True)
class History:
    """What is searched, the oldest first; of names with the same `key` one answer holds."""

    kind: str
    option: str
    line: list[str]
    named: Callable[[str], Commit]
    key: Callable[[str], str]
    root: Path = Path()


def commits_of(root: Path, commits: str, paths: Sequence[str] = ()) -> History:
    """Commits `A..B` around `root` (`UsageError`: none); `paths`, or all, decide an answer."""
    first, dots, last = commits.partition("..")
    if not first or not dots or last.startswith(".") or first.startswith("-"):
        raise UsageError(f"--commits: expected A..B, got {shown(commits)}")
    root = Path(git(root, "rev-parse", "--show-toplevel"))

    def resolved(name: str) -> str:
        options = ("--verify", "--quiet", "--end-of-options")
        try:
            return git(root, "rev-parse", *options, f"{name}^{{commit}}")
        except UsageError:
            said = f"--commits: expected a commit of {root}, got {shown(name)}"
            raise UsageError(said) from None

    old, new = resolved(first), resolved(last or "HEAD")
    if old == new or git(root, "merge-base", old, new, legal=(0, 1)) != old:
        said = "expected a commit A that B descends from"
        raise UsageError(f"--commits: {said}, got {shown(commits)}")
    words = ("--first-parent", "--reverse", "--format=%H%x00%s")
    lines = git(root, "log", *words, new, "--not", old, "--").split("\n")
    lines.insert(0, git(root, "log", "--no-walk", words[-1], old, "--"))
    subjects = dict(line.split("\0", 1) for line in lines)

    def key(name: str) -> str:
        files = git(root, "ls-tree", name, "--", *paths)
        return f"{OF_COMMITS}{hashlib.sha256(files.encode()).hexdigest()[:40]}"

    return History(
        kind="commit", option="--commits", line=list(subjects), key=key, root=root,
        named=lambda name: Commit(hash=name, subject=subjects[name]),
    )  # fmt: skip


def releases_of(package: str, versions: Sequence[str]) -> History:
    """Releases of a package, the oldest first."""
    return History(
        kind=f"release of {package}", option="--package", line=list(versions),
        key=lambda name: f"release-{hashlib.sha256(f'{package} {name}'.encode()).hexdigest()[:40]}",
        named=lambda name: Commit(hash=name),
    )  # fmt: skip


# --- the search -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CommitSearch(Json):
    """The suspects, the newest first, of commits or releases; `skipped` gave no verdict.

    `first` is the one from which on all are as `becomes` says, None if there are several suspects,
    of `num_commits` that it could be at the beginning; `num_runs` are tries.
    """

    first: Commit | None
    becomes: Literal["bad", "good"] = "bad"
    suspects: tuple[Commit, ...]
    skipped: tuple[Commit, ...]
    num_commits: int
    num_runs: int
    kind: str = "commit"
    policy: str = ""
    notes: tuple[str, ...] = ()

    @property
    def sought(self) -> str:
        """`first good release of timm`."""
        return f"first {self.becomes} {self.kind}"

    def __str__(self) -> str:
        cost = f"asked {count(self.num_runs, 'time')}, of {self.num_commits}"
        if self.first is not None:
            return f"{self.sought}: {self.first} ({cost})"
        ends = f"from {self.suspects[-1]} to {self.suspects[0]}"
        why = "; ".join((f"{len(self.skipped)} gave no verdict", *self.notes, cost))
        return f"{self.sought}: one of {len(self.suspects)}, {ends} ({why})"


def find_turn(
    history: History, run: Callable[[str, int], Reply], questions: Questions,
    *, every_run: bool = False,
) -> CommitSearch:  # fmt: skip
    """The first commit that fails, or of which none fails any more (`UsageError`: ends are alike).

    `run` tries a commit, which was tried so many times before. How often it fails is learnt at the
    bad end, unless it is known to fail in every run.
    """
    return _Search(history, run, questions).find(every_run=every_run)


class _Search:
    def __init__(
        self, history: History, run: Callable[[str, int], Reply], questions: Questions
    ) -> None:
        self._history, self._line = history, history.line
        self._run, self._questions = run, questions
        self._policy, self._num_runs = EVERY_RUN, 0
        self._good, self._bad = self._line[0], self._line[-1]
        self._answers: dict[str, list[Answer]] = {}
        self._suspects, self._skipped, self._notes = list[str](), list[str](), list[str]()

    def find(self, *, every_run: bool) -> CommitSearch:
        self._see_bad(1 if every_run else MAX_SILENT)
        if not every_run:
            self._learn()
        self._see_good(self._answer(self._good, self._policy.passes))
        while (lucky := self._halve()) is not None:
            name = self._history.named(lucky)
            self._notes.append(f"{name}: passed at first and failed when asked again")
            self._see_good("fails" if lucky == self._good else "passes")
            self._learn(flaky=True)
        return self._found()

    def _see_bad(self, tries: int) -> None:
        """Ask both ends in turn until one of them fails: that is the bad one."""
        ends = {self._bad: self._good, self._good: self._bad}
        for attempt, end in itertools.product(range(tries), ends):
            if "unresolved" not in self._known(end) and self._ask(end, attempt) == "fails":
                self._good, self._bad = ends[end], end
                return
        said = {"passes": "passes", "unresolved": "gives no verdict"}
        old, new = (f"{self._history.named(x)}, which {said[self._known(x)[-1]]}"
                    for x in (self._line[0], self._line[-1]))  # fmt: skip
        raise UsageError(
            f"{self._history.option}: expected an end that fails, got {old}, and {new}"
        )

    def _see_good(self, answer: Answer) -> None:
        if answer == "unresolved":
            self._skipped.append(self._good)
        elif answer == "fails":
            named, option = self._history.named, self._history.option
            said = f"got {named(self._good)}, which fails as well, while {named(self._bad)} fails"
            raise UsageError(f"{option}: expected an end that passes, {said}")

    def _learn(self, *, flaky: bool = False) -> None:
        # Halvings, both ends, and what skips may add.
        num_questions = math.ceil(math.log2(len(self._line))) + 2
        ask = partial(self._ask, self._bad)
        try:
            self._policy = learn(ask, num_questions=num_questions, flaky=flaky)
        except NeverFails as error:
            end = self._history.named(self._bad)
            said = f"expected an end that fails, got {end}: {error}"
            raise UsageError(f"{self._history.option}: {said}") from error

    def _known(self, name: str) -> list[Answer]:
        return self._answers.setdefault(self._history.key(name), [])

    def _ask(self, name: str, attempt: int) -> Answer:
        key, answers = self._history.key(name), self._known(name)
        if attempt == len(answers):
            again = f" (run {attempt + 1})" if attempt else ""
            words = f"does {self._history.named(name)} fail?{again}"
            find_out = partial(self._run, name, attempt)
            reply = self._questions.reply(f"{key}-{attempt}", words, len(LEGS), find_out)
            self._num_runs += 1
            answers.append(reply.answer)
        return answers[attempt]

    def _answer(self, name: str, passes: int) -> Answer:
        """Fails once it has failed, passes after so many runs; all runs so far count."""
        numbers = range(max(passes, len(self._known(name))))
        answers = (self._ask(name, number) for number in numbers)
        return next((answer for answer in answers if answer != "passes"), "passes")

    def _halve(self) -> str | None:
        """Halve until one suspect is left, or only skipped ones; the last pass if it was luck."""
        line, ends = self._line, [0, len(self._line) - 1]
        good = 0 if self._good == line[0] else 1
        while inner := [n for n in range(ends[0] + 1, ends[1]) if line[n] not in self._skipped]:
            at = min(inner, key=lambda n: abs(2 * n - sum(ends)))
            answer = self._answer(line[at], self._policy.passes)
            if answer == "fails":
                ends[1 - good] = at
            elif answer == "passes" or line[ends[good]] in self._skipped:
                ends[good] = at
            if answer == "unresolved":
                self._skipped.append(line[at])
        if (last := line[ends[good]]) not in self._skipped:
            self._suspects = line[ends[0] + 1 : ends[1] + 1][::-1]
            return None if self._answer(last, self._policy.confirmations) == "passes" else last
        first = self._history.named(line[ends[1 - good]])
        self._notes.append(f"none that was asked passes; {first} fails, what is beyond it gives no "
                           "verdict")  # fmt: skip
        self._suspects = (line[: ends[1] + 1] if good == 0 else line[ends[0] + 1 :])[::-1]
        return None

    def _found(self) -> CommitSearch:
        named, suspects = self._history.named, self._suspects
        return CommitSearch(
            first=named(suspects[0]) if len(suspects) == 1 else None,
            becomes="bad" if self._bad == self._line[-1] else "good",
            suspects=tuple(map(named, suspects)), skipped=tuple(map(named, sorted(self._skipped))),
            num_commits=len(self._line) - 1, num_runs=self._num_runs, kind=self._history.kind,
            notes=tuple(self._notes),
            policy="one run each" if self._policy == EVERY_RUN else str(self._policy),
        )  # fmt: skip


# --- runs at a commit --------------------------------------------------------------------------


class Checkout(NamedTuple):
    """One try of a commit: `folder` has its files, nothing of `repository` may come into a run."""

    folder: Path
    repository: Path
    commit: str
    attempt: int


Run = Callable[[Checkout], Reply]


def turning_commit(
    history: History, run: Run, questions: Questions, place: Path, **how: Any
) -> CommitSearch:
    """As `find_turn`, with each commit checked out in a worktree at `place`.

    One that is there is of a search that was killed, as whoever asks holds its folder.
    """

    def remove() -> None:
        # By hand: git refuses to remove what holds submodules, or what is half made.
        shutil.rmtree(place, ignore_errors=True)
        with suppress(UsageError):
            git(history.root, "worktree", "prune")

    def in_checkout(commit: str, attempt: int) -> Reply:
        # No file of another commit stays, nor a compiled module.
        git(folder, "checkout", "--quiet", "--force", "--detach", commit)
        git(folder, "clean", "-ffdxq")
        return run(Checkout(folder, history.root, commit, attempt))

    folder = place.absolute()
    remove()
    make_folder(place.parent)
    try:
        git(history.root, "worktree", "add", "--quiet", "--detach", str(folder), history.line[-1])
        return find_turn(history, in_checkout, questions, **how)
    finally:
        remove()


def case_run(place: Path, verdict: Verdict, folder: Path, room: Sequence[str] = ()) -> Run:
    """Runs the case of a case folder again, with the harness of the commit, in `folder`.

    Whatever else than `verdict` a run does is no verdict; `room` has options of `harness rerun`.
    """

    def run(checkout: Checkout) -> Reply:
        lacking = [name for name in PACKAGES if not (checkout.folder / name).is_dir()]
        if lacking:  # an installed one would run in its place
            return Reply(answer="unresolved", words=f"no verdict: it has no {lacking[0]}")
        make_folder(folder)
        name = f"{checkout.commit[:HASH_CHARS]}-{checkout.attempt}"
        out = unused(folder / name).absolute()
        log, answers = folder / f"{name}.log", folder / f"{name}.json"
        command = (
            *(sys.executable, "-m", "harness", "rerun", str(place.absolute())),
            *("--out", str(out), "--json", "--no-history", *room),
        )
        try:
            code = _run(command, log, _environment(checkout), answers)
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
        if code in (ExitCode.INTERRUPTED, -signal.SIGINT, -signal.SIGTERM):
            raise Interrupted(f"interrupted at {checkout.commit[:HASH_CHARS]}")
        return _judged(code, answers, log, verdict)

    return run


def _environment(checkout: Checkout) -> dict[str, str]:
    """Of a run whose modules are the commit's, and none of the user's checkout."""
    entries = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    others = [x for x in entries if not Path(x).absolute().is_relative_to(checkout.repository)]
    # What git sets for its hooks would make each git of the run that of the user's checkout. We
    # start where we are, for paths of the case; the interpreter does not look there for modules.
    return outside_hooks() | {
        "PYTHONPATH": os.pathsep.join([str(checkout.folder), *others]), "PYTHONSAFEPATH": "1",
    }  # fmt: skip


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
        return Reply(answer="unresolved", words=one_line(f"no verdict: {said}"))
    due = ExitCode.FAILED if outcome == "failed" else ExitCode.NO_VERDICT
    if (outcome, code) == ("passed", ExitCode.PASSED):
        return Reply(answer="passes", words=outcome)
    if same and (outcome, what, code) == (wanted.outcome, wanted.what, due):
        return Reply(answer="fails", words=one_line(f"{outcome} {what}".strip()))
    words = f"no verdict: {outcome} {what} {message}"
    return Reply(answer="unresolved", words=one_line(words.strip()))


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
            if process.poll() is None:
                # Asked first, so that a harness keeps what it has.
                with suppress(OSError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, signal.SIGINT)
                    process.wait(GRACE_S)
            kill_group(process.pid)
            process.wait()


def commit_run(case: CaseSpec, verdict: Verdict, asker: Asker, top: Path) -> Run:
    """Runs the case with the program of a commit, under this harness; `top` is its repository."""
    failure = failure_of(verdict)

    def run(checkout: Checkout) -> Reply:
        legs: dict[str, Any] = {leg: at_commit(getattr(case, leg), checkout, top) for leg in LEGS}
        program = program_in(legs["candidate"])
        if program.kind == "script" and not Path(program.target).is_file():
            return Reply(answer="unresolved", words="no verdict: the script is not in this commit")
        legs["candidate"] = again(legs["candidate"], checkout.attempt)
        question = question_of(case, "commit", **legs)
        found = asker.ask(question, "").verdict
        reply, end = _reply(failure.answer(found), found), found.ending
        is_same = same_end(verdict, end.exception if end else "", end.signal if end else "")
        return reply if reply.answer != "fails" or is_same else _reply("unresolved", found)

    return run


def _reply(answer: Answer, found: Verdict) -> Reply:
    """With the reason, where it is no verdict."""
    words = str(failure_of(found))
    why = f"no verdict: {words} {found.message}" if answer == "unresolved" else words
    return Reply(answer=answer, words=one_line(why))


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
        is_named = named.is_file() or (os.sep in value and named.is_dir())
        there = moved(str(named))
        return there if is_named and there != str(named) and Path(there).exists() else value

    program = dict(spec.config["program"])
    program |= {name: moved(program[name]) for name in ("target", "folder")}
    program["args"] = {name: argument(value) for name, value in program["args"].items()}
    return replace(spec, config=spec.config | {"program": program, "commit": checkout.commit})


# --- releases of a package -------------------------------------------------------------------


def find_release(
    case: CaseSpec, verdict: Verdict, package: str, ends: str, asker: Asker,
    *, every_run: bool = False,
) -> CommitSearch:  # fmt: skip
    """As `find_turn`, among the releases `A..B` of a package.

    The reference has the release, too, unless it is what the two runs differ in.
    """
    versions, failure = published(package, ends), failure_of(verdict)
    leaf = f"packages.{package}"
    stated = [leaves_of(spec.config).get(leaf) for spec in (case.reference, case.candidate)]

    def run(version: str, attempt: int) -> Reply:
        reference, candidate = (
            replace(spec, config=config_of(leaves_of(spec.config) | {leaf: version}))
            for spec in (case.reference, case.candidate)
        )
        if stated[0] != stated[1]:
            reference = case.reference
        try:
            make_environments([program_in(candidate)], lambda _: None)
        except UsageError as error:
            return Reply(answer="unresolved", words=one_line(f"no verdict: {error}"))
        question = question_case(case, failure, candidate, reference=reference, repeat=attempt)
        (found,) = asker.ask_all([question], "")
        return _reply(failure.answer(found), found)

    return find_turn(releases_of(package, versions), run, asker.questions, every_run=every_run)


def published(package: str, ends: str) -> list[str]:
    """The releases `A..B` of a package, the oldest first (`UsageError`: none such)."""
    first, dots, last = ends.partition("..")
    if not first or not dots or not last or last.startswith("."):
        raise UsageError(f"--package: expected NAME A..B, got {shown(ends)}")
    return releases(package, first, last, Path(sys.executable))
