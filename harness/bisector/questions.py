"""Questions that cost runs, their answers, and the journal that keeps both.

    {"journal": 2, "code": ..., "environment": ..., "case": ..., "sha256": ...}
    {"question": {...}, "reply": {...}, "sha256": ...}        one line a question, in order

A search asks everything through `Journal.ask`. A search that is started again asks the same
questions in the same order, and gets the stored replies until it comes to the first that is not
there. A line is whole once it ends in a line break: a last one that was cut is dropped and its
question asked again. Damage anywhere else is an error, as a search must not go on from an answer
that nobody gave.
"""

import errno
import fcntl
import json
import math
import os
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self

from harness.codec import Json, RecordError, dumps, strict_loads
from harness.errors import HarnessError, Infrastructure, UsageError, shown
from harness.machine import Machine
from harness.program.spec import codes_of
from harness.provenance import changes, everything, record
from harness.records import CaseSpec, ExitCode
from harness.store.files import make_folder, read_plain, refused, with_checksum, without_checksum

Answer = Literal["fails", "passes", "unresolved"]
"""What runs said. `unresolved`: they could not be made, or failed in another way."""
FAILS: Final = "fails"
PASSES: Final = "passes"
UNRESOLVED: Final = "unresolved"

SCHEMA = 2
MOST_TOLD = 3
MAX_BYTES = 1 << 28


class OtherSchema(Infrastructure):
    """A journal that an older or newer harness has written."""


class OutOfBudget(HarnessError):
    """The next question costs more than is left.

    Attributes:
        best: what the search knows so far; whoever catches it on the way up may set it.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.NO_VERDICT

    def __init__(self, text: str, best: Any = None) -> None:
        super().__init__(text)
        self.best = best


@dataclass(frozen=True, kw_only=True)
class Identity(Json):
    """What answers hold for: a journal of something else is refused.

    Attributes:
        code: of the program, or the range that is searched.
        environment: name to value of whatever else decides bits.
        case: id or key of the case.
    """

    code: str
    environment: dict[str, str]
    case: str

    def differs_from(self, other: "Identity") -> str:
        """What became of these answers' code, environment and case; "" if all is the same."""
        return changes(self._flat(), other._flat(), MOST_TOLD)

    def _flat(self) -> dict[str, str]:
        return {"case": self.case, "code": self.code or "unknown", **self.environment}


def identity_of(case: CaseSpec, here: Machine, environ: Mapping[str, str] = os.environ) -> Identity:
    """What answers that are found now, on this machine, hold for."""
    now = record(json.loads(dumps(here)), codes_of([case.candidate.config]), environ)
    return Identity(
        code=now["code"],
        environment={"device": case.candidate.device, **everything(now), **_tokens(case)},
        case=case.id,
    )


def _tokens(case: CaseSpec) -> dict[str, str]:
    """The file that a case reads, if it does: its size and the time of its last change."""
    data = case.candidate.config.get("data")
    path = data.get("path") if isinstance(data, Mapping) else None
    if not path:
        return {}
    try:
        facts = Path(str(path)).stat()
    except OSError as error:
        return {"tokens": f"{path}: {error.strerror}"}
    return {"tokens": f"{path}: {facts.st_size} bytes of {facts.st_mtime_ns}"}


@dataclass(frozen=True, kw_only=True)
class Question(Json):
    """Something that only runs can say.

    Attributes:
        key: the same key is the same question; made of all that decides the answer.
        words: the question for people, in one line.
        runs: that it costs at most; 0 is free and is asked whatever the budget.
    """

    key: str
    words: str
    runs: int = 1


@dataclass(frozen=True, kw_only=True)
class Reply(Json):
    """What came of a question.

    Attributes:
        answer: for questions of yes and no; None for others, whose `detail` speaks.
        words: for people, in one line.
        detail: JSON values, as the asker needs them.
        runs: that were made for it.
        seconds: that it took.
    """

    answer: Answer | None = None
    words: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    runs: int = 1
    seconds: float = 0.0


class Budget:
    """What one sitting of a search may cost; stored replies cost nothing.

    Args:
        runs: number of runs, None for any.
        minutes: from now on, None for any.
        clock: seconds that only run.
    """

    def __init__(
        self,
        *,
        runs: int | None = None,
        minutes: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if runs is not None and runs < 0:
            raise UsageError(f"budget: expected a number of runs from 0, got {runs}")
        if minutes is not None and not 0 <= minutes < math.inf:
            raise UsageError(f"budget: expected minutes from 0, got {minutes}")
        self.max_runs = runs
        self.max_minutes = minutes
        self.spent_runs = 0
        self._clock = clock
        self._began_s = clock()

    @property
    def spent_minutes(self) -> float:
        """Since the sitting began."""
        return (self._clock() - self._began_s) / 60

    def check(self, runs: int) -> None:
        """See that a question may be asked.

        Raises:
            OutOfBudget: it costs more runs than are left, or the time is over.
        """
        if runs == 0:
            return
        if self.max_runs is not None and self.spent_runs + runs > self.max_runs:
            raise OutOfBudget(
                f"the budget of {self.max_runs} runs: {self.spent_runs} spent, the next question "
                f"takes up to {runs}"
            )
        if self.max_minutes is not None and self.spent_minutes >= self.max_minutes:
            raise OutOfBudget(f"the budget of {self.max_minutes:g} minutes is spent")

    def spend(self, runs: int) -> None:
        """Take runs off what is left."""
        self.spent_runs += runs


class Journal:
    """Every question of a search and its reply, in a file that outlives it. One writer at a time.

    Args:
        path: of the file; made if it is not there.
        identity: what the answers hold for.
        budget: of this sitting; None for any.
        clock: seconds that only run, for replies that do not say how long they took.
        told: called after each new answer.

    Raises:
        UsageError: another search writes it, or it is of another code, environment or case.
        Infrastructure: a line is damaged, or the disk refused.
    """

    def __init__(
        self,
        path: Path,
        identity: Identity,
        budget: Budget | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        told: Callable[["Journal"], None] = lambda _: None,
    ) -> None:
        self._told = told
        self.path = path
        self.identity = identity
        self.budget = budget or Budget()
        self._clock = clock
        make_folder(path.parent)
        self._fd = _open_alone(path)
        try:
            data = _read_all(self._fd, path)
            whole = data.rfind(b"\n") + 1
            self._entries = _parse(data[:whole], path, identity)
            if whole < len(data):
                _disk(path, lambda: os.ftruncate(self._fd, whole))
            if not whole:
                self._append(_head(identity))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let others write it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def entries(self) -> tuple[tuple[Question, Reply], ...]:
        """All that was asked, in order."""
        return tuple(self._entries.values())

    def known(self, key: str) -> Reply | None:
        """The stored reply to a question, if there is one."""
        entry = self._entries.get(key)
        return entry and entry[1]

    def ask(self, question: Question, find_out: Callable[[], Reply]) -> Reply:
        """The stored reply, or the one that `find_out` gives, which is then stored.

        Nothing is stored if `find_out` raises, so a question that was interrupted is asked again.

        Raises:
            OutOfBudget: the budget does not allow the question.
            Infrastructure: the disk refused.
        """
        if (known := self.known(question.key)) is not None:
            return known
        self.budget.check(question.runs)
        began_s = self._clock()
        reply = find_out()
        if reply.seconds == 0:
            # Rounded: it is told to people, and compared with nothing.
            seconds = round(self._clock() - began_s, 3)
            kept = {f.name: getattr(reply, f.name) for f in fields(reply)}
            reply = Reply(**kept | {"seconds": seconds})
        self.budget.spend(reply.runs)
        self._append({"question": question.to_json(), "reply": reply.to_json()})
        self._entries[question.key] = (question, reply)
        self._told(self)
        return reply

    def _append(self, plain: Mapping[str, Any]) -> None:
        line = f"{dumps(with_checksum(plain))}\n".encode()
        end = os.lseek(self._fd, 0, os.SEEK_END)

        def write() -> None:
            written = 0
            while written < len(line):
                written += os.write(self._fd, line[written:])
            os.fsync(self._fd)

        try:
            _disk(self.path, write)
        except Infrastructure:
            # What follows half a line would be damage in the middle.
            os.ftruncate(self._fd, end)
            raise


def read_journal(path: Path) -> tuple[Identity, tuple[tuple[Question, Reply], ...]]:
    """What a journal holds, for whoever only looks; a last line that is cut is left out.

    Raises:
        Infrastructure: there is none, a line is damaged, or the disk refused.
    """
    try:
        data = read_plain(path, MAX_BYTES)
    except OSError as error:
        raise refused("read", path, error) from error
    whole = data[: data.rfind(b"\n") + 1]
    first = whole.split(b"\n", 1)[0]
    identity = _identity(_line(first, 1, path), path)
    return identity, tuple(_parse(whole, path, identity).values())


def _head(identity: Identity) -> dict[str, Any]:
    return {"journal": SCHEMA, **identity.to_json()}


def _identity(plain: Mapping[str, Any], path: Path) -> Identity:
    rest = {key: value for key, value in plain.items() if key != "journal"}
    if plain.get("journal") != SCHEMA:
        raise OtherSchema(
            f"{path}:1: expected a journal of schema {SCHEMA}, got {shown(plain.get('journal'))}"
        )
    try:
        return Identity.from_json(rest)
    except RecordError as error:
        raise Infrastructure(f"{path}:1: {error}") from error


def _line(data: bytes, number: int, path: Path) -> dict[str, Any]:
    where = f"{path}:{number}"
    try:
        plain = strict_loads(data.decode())
        if not isinstance(plain, dict) or "sha256" not in plain:
            raise RecordError("expected an object with a checksum")
        return without_checksum(plain, "the line")
    except (ValueError, RecursionError) as error:
        raise Infrastructure(f"{where}: damaged, so the search cannot go on: {error}") from error


def _parse(data: bytes, path: Path, identity: Identity) -> dict[str, tuple[Question, Reply]]:
    lines = data.split(b"\n")[:-1]
    found: dict[str, tuple[Question, Reply]] = {}
    for number, line in enumerate(lines, start=1):
        plain = _line(line, number, path)
        if number == 1:
            if what := _identity(plain, path).differs_from(identity):
                raise UsageError(
                    f"{path}: expected answers that hold here and now, but {what}: name another "
                    "folder, or remove this one"
                )
            continue
        try:
            if set(plain) != {"question", "reply"}:
                raise RecordError(f"expected a question and a reply, got {sorted(plain)}")
            question = Question.from_json(plain["question"])
            reply = Reply.from_json(plain["reply"])
        except RecordError as error:
            raise Infrastructure(f"{path}:{number}: {error}") from error
        if question.key in found:
            raise Infrastructure(f"{path}:{number}: the question {shown(question.key)} twice")
        found[question.key] = (question, reply)
    return found


def _open_alone(path: Path) -> int:
    # Not through a link: the file is written to, whosever it is.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        raise refused("open", path, error) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Infrastructure(f"cannot open {path}: expected a file")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UsageError(f"{path} is in use by another search") from None
    except OSError as error:
        os.close(fd)
        raise refused("lock", path, error) from error
    except Infrastructure:
        os.close(fd)
        raise
    return fd


def _read_all(fd: int, path: Path) -> bytes:
    size = os.fstat(fd).st_size
    if size > MAX_BYTES:
        raise refused("read", path, OSError(errno.EFBIG, f"more than {MAX_BYTES} bytes"))
    with os.fdopen(os.dup(fd), "rb") as file:
        try:
            return file.read()
        except OSError as error:
            raise refused("read", path, error) from error


def _disk(path: Path, action: Callable[[], object]) -> None:
    try:
        action()
    except OSError as error:
        raise refused("write", path, error) from error
