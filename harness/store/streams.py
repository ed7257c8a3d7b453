"""Reading rank files: whatever is in them becomes records or problems, never an exception.

A problem is worded 'line N: why' and says 'after end' of a line that follows the end record. A
record that decodes is kept even if it is out of place, so that the checks can see it; one that
belongs to another rank is a problem only.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from harness.errors import one_line
from harness.records import (
    SCHEMA_VERSION,
    EndRecord,
    ErrorRecord,
    EventRecord,
    InitialRecord,
    NamesRecord,
    RankRecords,
    Record,
    RecordError,
    StartRecord,
    StepRecord,
    dumps,
    parse_record,
)
from harness.store.checksum import LinesChecksum
from harness.store.files import open_plain, read_tail
from harness.store.naming import with_all_names

MAX_LINE_BYTES = 64 << 20
END_BYTES = 4096
"""More than an end record has."""
STEP_BYTES = 4 << 20
"""More than a step record has of a model with 10,000 tensors."""
MAX_PROBLEMS = 100
"""Problems listed of one file; the rest is counted."""


def rank_path(folder: Path, rank: int) -> Path:
    """Where a rank's records lie."""
    return folder / f"rank{rank}.jsonl"


def has_begun(path: Path, *, is_builtin: bool) -> bool:
    """Whether a rank's file says anything of a step, or of a program's state in its first one.

    The built-in trainer records its state before it compiles and captures anything.
    """
    kinds = (b'"kind":"step"',) if is_builtin else (b'"kind":"step"', b'"kind":"initial"')
    try:
        with open_plain(path) as file:
            return any(kind in line for line in file for kind in kinds)
    except OSError:
        return False


def last_step_s(path: Path) -> float | None:
    """Seconds of the last step that a rank's file has whole; None before there is one."""
    for line in reversed(read_tail(path, STEP_BYTES).split(b"\n")):
        if b'"kind":"step"' in line:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                return float(json.loads(line)["step_s"])
    return None


def has_end_record(path: Path) -> bool:
    """Whether the last line of a rank's file is its end record."""
    last = read_tail(path, END_BYTES).rstrip(b"\n").rpartition(b"\n")[2]
    return b'"kind":"end"' in last


def read_ranks(folder: Path, world_size: int) -> tuple[RankRecords, ...]:
    """Records of ranks 0 to `world_size` - 1; a rank without a file has nothing at all.

    Files of ranks that cannot exist are a problem of the last rank.
    """
    ranks = [read_rank(rank_path(folder, rank), rank) for rank in range(world_size)]
    expected = {rank_path(folder, rank).name for rank in range(world_size)}
    extra = sorted(p.name for p in folder.glob("rank*.jsonl") if p.name not in expected)
    if extra and ranks:
        last = ranks[-1]
        problem = f"line 0: files beyond world size {world_size}: {', '.join(extra[:8])}"
        ranks[-1] = RankRecords(
            rank=last.rank, start=last.start, steps=last.steps, events=last.events,
            error=last.error, end=last.end, problems=(*last.problems, problem),
        )  # fmt: skip
    return tuple(ranks)


def read_rank(path: Path, rank: int) -> RankRecords:
    """Everything that one rank's file says."""
    reading = _Reading(rank)
    try:
        with open_plain(path) as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                    reading.problem(number, f"longer than {MAX_LINE_BYTES} bytes: read no further")
                    break
                reading.take(number, line)
    except FileNotFoundError:
        pass
    except OSError as error:
        reading.problem(0, f"cannot be read: {error.strerror or error}")
    return reading.result()


def read_start(path: Path) -> StartRecord | None:
    """The start record of a rank's file alone; None while it is not there whole."""
    try:
        with open_plain(path) as file:
            record = parse_record(file.readline(MAX_LINE_BYTES).decode())
    except (OSError, RecordError, UnicodeDecodeError, RecursionError):
        return None
    return record if isinstance(record, StartRecord) else None


class _Reading:
    """Collects one file's lines in order."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._start: StartRecord | None = None
        self._steps: list[StepRecord] = []
        self._events: list[EventRecord] = []
        self._error: ErrorRecord | None = None
        self._end: EndRecord | None = None
        self._problems: list[str] = []
        self._after_end: list[str] = []
        self._num_unlisted = 0
        self._initial: InitialRecord | None = None
        self._names: list[NamesRecord] = []
        self._checksum = LinesChecksum()

    def problem(self, number: int, why: str, *, after_end: bool = False) -> None:
        if after_end and not self._after_end:
            self._after_end.append(f"line {number}: {why}")
        if len(self._problems) < MAX_PROBLEMS:
            self._problems.append(f"line {number}: {why}")
        else:
            self._num_unlisted += 1

    def take(self, number: int, line: bytes) -> None:
        """Decode one line and put it where it belongs."""
        after_end = " after end" if self._end is not None else ""
        try:
            record = parse_record(line.decode())
        except (RecordError, UnicodeDecodeError, RecursionError) as error:
            cut = "" if line.endswith(b"\n") else f"cut short after {len(line)} bytes: "
            self.problem(number, f"{cut}{_short(error)}{after_end}", after_end=bool(after_end))
            self._checksum.add(line)
            return
        for why in self._misplaced(record, number):
            self.problem(number, why)
        if isinstance(record, EndRecord) and not after_end:
            if not record.sha256:
                self.problem(number, "its checksum is gone")
            expected = dumps(self._checksum.sealed(record)) + "\n"
            if record.sha256 and line != expected.encode():
                self.problem(number, "changed since it was written: the checksum does not fit")
        self._checksum.add(line)
        if after_end:
            self.problem(number, f"{record.kind} record after end", after_end=True)
        elif self._error is not None and not isinstance(record, EventRecord):
            self.problem(number, f"{record.kind} record after an error record")
        if isinstance(record, StartRecord) or record.rank == self._rank:
            self._keep(number, record)

    def _misplaced(self, record: Record, number: int) -> Iterator[str]:
        if record.rank != self._rank:
            yield f"{record.kind} record of rank {record.rank} in the file of rank {self._rank}"
        if isinstance(record, StartRecord) and number != 1:
            yield "start record is not the first line"
        if isinstance(record, StartRecord) and record.schema != SCHEMA_VERSION:
            yield f"schema {record.schema}, expected {SCHEMA_VERSION}"
        if isinstance(record, StepRecord) and self._start is None:
            yield f"step {record.step} before a start record"
        if isinstance(record, StepRecord) and self._steps and record.rank == self._rank:
            last = self._steps[-1].step
            if record.step <= last:
                yield f"step {record.step} follows step {last}"

    def _keep(self, number: int, record: Record) -> None:
        match record:
            case StepRecord():
                self._steps.append(record)
            case EventRecord():
                self._events.append(record)
            case NamesRecord():
                self._names.append(record)
            case InitialRecord() if self._initial is None:
                self._initial = record
            case StartRecord() if self._start is None:
                self._start = record
            case ErrorRecord() if self._error is None:
                self._error = record
            case EndRecord() if self._end is None:
                self._end = record
            case _:
                self.problem(number, f"a second {record.kind} record")

    def result(self) -> RankRecords:
        """What was collected."""
        unlisted = [f"line 0: {self._num_unlisted} more problems"] if self._num_unlisted else []
        records = RankRecords(
            rank=self._rank,
            start=self._start,
            steps=tuple(self._steps),
            events=tuple(self._events),
            error=self._error,
            end=self._end,
            problems=(*self._problems, *unlisted),
            initial=self._initial,
            after_end=tuple(self._after_end),
        )
        return with_all_names(records, self._names) if self._names else records


def _short(error: Exception, size: int = 200) -> str:
    text = one_line(str(error))
    return text if len(text) <= size else f"{text[:size]}..."
