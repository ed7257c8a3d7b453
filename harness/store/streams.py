"""Reading rank files: whatever is in them becomes records or problems, never an exception.

A problem is worded 'line N: why' and says 'after end' of a line that follows the end record. A
record that decodes is kept even if it is out of place, so that the checks can see it; one that
belongs to another rank is a problem only.

A program that the harness did not write makes optimizer state in its first step, leaves gradients
out, adds parameters: its rank says from which step on a group has which tensors (`NamesRecord`).
Here every step gets the tensors of all steps, in the order in which they first appear, with the
digest `ABSENT` for what it did not hold: so a tensor that one run has and another has not differs
like any other, at its step and under its name.
"""

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.codec import strict_loads
from harness.errors import one_line
from harness.records import (
    ABSENT,
    DIGEST_GROUPS,
    DIGEST_HEX_CHARS,
    SCHEMA_VERSION,
    TAP_HEX_CHARS,
    EndRecord,
    EventRecord,
    NamesRecord,
    RankRecords,
    Record,
    RecordError,
    RunResult,
    StartRecord,
    StepRecord,
    parse_record,
)
from harness.store.files import open_plain, read_tail

MAX_LINE_BYTES = 64 << 20
END_BYTES = 4096
"""More than an end record has."""
STEP_BYTES = 4 << 20
"""More than a step record has of a model with 10,000 tensors."""
MAX_PROBLEMS = 100
"""Problems listed of one file; the rest is counted."""

Tensors = Mapping[str, Sequence[str]]
Names = tuple[Tensors, Sequence[str]]
"""Of tensors by group, and of rows of taps."""


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
                return float(strict_loads(line)["step_s"])
    return None


def has_end_record(path: Path) -> bool:
    """Whether the last line of a rank's file is its end record."""
    last = read_tail(path, END_BYTES).rstrip(b"\n").rpartition(b"\n")[2]
    return b'"kind":"end"' in last


def read_start(path: Path) -> StartRecord | None:
    """The start record of a rank's file alone; None while it is not there whole."""
    try:
        with open_plain(path) as file:
            record = parse_record(file.readline(MAX_LINE_BYTES))
    except (OSError, RecordError):
        return None
    return record if isinstance(record, StartRecord) else None


def read_ranks(folder: Path, world_size: int) -> tuple[RankRecords, ...]:
    """Records of ranks 0 to `world_size` - 1; a rank without a file has nothing at all.

    Files of ranks that cannot exist are a problem of the last rank.
    """
    ranks = [read_rank(rank_path(folder, rank), rank) for rank in range(world_size)]
    expected = {rank_path(folder, rank).name for rank in range(world_size)}
    extra = sorted(p.name for p in folder.glob("rank*.jsonl") if p.name not in expected)
    if extra and ranks:
        problem = f"line 0: files beyond world size {world_size}: {', '.join(extra[:8])}"
        ranks[-1] = replace(ranks[-1], problems=(*ranks[-1].problems, problem))
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


class _Reading:
    """Collects one file's lines in order."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._steps: list[StepRecord] = []
        self._events: list[EventRecord] = []
        self._names: list[NamesRecord] = []
        self._once: dict[str, Any] = dict.fromkeys(("start", "initial", "error", "end"))
        self._problems: list[str] = []
        self._after_end: list[str] = []

    def problem(self, number: int, why: str) -> None:
        self._problems.append(f"line {number}: {why}")

    def take(self, number: int, line: bytes) -> None:
        """Decode one line and put it where it belongs."""
        is_after_end, has_failed = self._once["end"] is not None, self._once["error"] is not None
        try:
            record = parse_record(line)
        except RecordError as error:
            cut = "" if line.endswith(b"\n") else f"cut short after {len(line)} bytes: "
            self.problem(number, f"{cut}{_short(error)}{' after end' if is_after_end else ''}")
        else:
            for why in self._misplaced(record, number):
                self.problem(number, why)
            if is_after_end:
                self.problem(number, f"{record.kind} record after end")
            elif has_failed and not isinstance(record, EventRecord):
                self.problem(number, f"{record.kind} record after an error record")
            if isinstance(record, StartRecord) or record.rank == self._rank:
                self._keep(number, record)
        if is_after_end and not self._after_end:
            self._after_end = [each for each in self._problems if each.endswith("after end")][:1]

    def _misplaced(self, record: Record, number: int) -> Iterator[str]:
        if record.rank != self._rank:
            yield f"{record.kind} record of rank {record.rank} in the file of rank {self._rank}"
        if isinstance(record, StartRecord) and number != 1:
            yield "start record is not the first line"
        if isinstance(record, StartRecord) and record.schema != SCHEMA_VERSION:
            yield f"schema {record.schema}, expected {SCHEMA_VERSION}"
        if isinstance(record, StepRecord) and self._once["start"] is None:
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
            case _ if self._once[record.kind] is None:
                self._once[record.kind] = record
            case _:
                self.problem(number, f"a second {record.kind} record")

    def result(self) -> RankRecords:
        """What was collected."""
        problems, end = self._problems, self._once["end"]
        if len(problems) > MAX_PROBLEMS:
            rest = f"line 0: {len(problems) - MAX_PROBLEMS} more problems"
            problems = [*problems[:MAX_PROBLEMS], rest]
        assert end is None or isinstance(end, EndRecord)
        records = RankRecords(
            rank=self._rank, steps=tuple(self._steps), events=tuple(self._events),
            problems=tuple(problems), after_end=tuple(self._after_end), **self._once,
        )  # fmt: skip
        return with_all_names(records, self._names) if self._names else records


def _short(error: Exception, size: int = 200) -> str:
    text = one_line(str(error))
    return text if len(text) <= size else f"{text[:size]}..."


# --- names that change from step to step ------------------------------------------------------


def with_all_names(records: RankRecords, names: Iterable[NamesRecord]) -> RankRecords:
    """The records with one list of names for all steps, in the start record.

    Lengths that do not fit the names become problems.
    """
    if records.start is None:
        return records
    ordered = sorted(names, key=lambda record: record.step)
    held: list[Names] = [({}, ())]
    for record in ordered:
        held.append((held[-1][0] | record.tensors, record.taps))  # type: ignore[operator] # dicts
    steps = [record.step for record in ordered]
    empty: Tensors = dict.fromkeys(DIGEST_GROUPS, ())
    whole = _union([(empty, ()), *((record.tensors, record.taps) for record in ordered)])
    return _spread(records, records.start, lambda step: held[bisect_right(steps, step)], whole)


def aligned(*runs: RunResult) -> tuple[RunResult, ...]:
    """Runs of a program with the same names on each rank, in the order of the first run.

    Of two runs one may have from the start what the other makes in its first step.
    """
    if all(run.spec.is_builtin for run in runs):
        return runs
    held: dict[int, list[Names]] = {}
    for records in (records for run in runs for records in run.ranks):
        if records.start is not None:
            names = (records.start.tensors, records.start.taps)
            held.setdefault(records.rank, []).append(names)
    wholes = {rank: _union(names) for rank, names in held.items()}
    return tuple(
        replace(run, ranks=tuple(_laid_over(each, wholes.get(each.rank)) for each in run.ranks))
        for run in runs
    )


def _laid_over(records: RankRecords, whole: Names | None) -> RankRecords:
    start = records.start
    if start is None or whole is None or (start.tensors, start.taps) == whole:
        return records
    laid = _spread(records, start, lambda step: (start.tensors, start.taps), whole)
    return replace(laid, problems=records.problems)


def _union(names: Iterable[Names]) -> Names:
    """All names, each once, in the order in which they first appear."""
    tensors: dict[str, dict[str, None]] = {}
    taps: dict[str, None] = {}
    for groups, rows in names:
        for group, held in groups.items():
            tensors.setdefault(group, {}).update(dict.fromkeys(held))
        taps.update(dict.fromkeys(rows))
    return {group: tuple(held) for group, held in tensors.items()}, tuple(taps)


def _spread(
    records: RankRecords, start: StartRecord, names_at: Callable[[int], Names], whole: Names
) -> RankRecords:
    """The records laid over the names `whole`; their own ones are `names_at` each step."""
    problems: list[str] = []
    tensors, taps = whole

    def laid(digests: Mapping[str, str], step: int) -> dict[str, str]:
        where = "the initial state" if step < 0 else f"step {step}"
        return dict(_expanded(digests, names_at(step)[0], tensors, problems, where))

    initial = records.initial
    if initial is not None:
        initial = replace(initial, digests=laid(initial.digests, -1))
    steps = tuple(
        replace(step, digests=laid(step.digests, step.step),
                taps=_taps(step, names_at(step.step)[1], taps))
        for step in records.steps
    )  # fmt: skip
    named = {group: tuple(names) for group, names in tensors.items()}
    start = replace(start, tensors=named, taps=tuple(taps), tap_stages=(0,) * len(taps))
    return replace(
        records, start=start, steps=steps, initial=initial,
        problems=(*records.problems, *problems[:8]),
    )  # fmt: skip


def _expanded(
    digests: Mapping[str, str], now: Tensors, whole: Tensors, problems: list[str], where: str
) -> Iterator[tuple[str, str]]:
    size = DIGEST_HEX_CHARS
    for group, names in whole.items():
        text, held = digests.get(group), now.get(group, ())
        if text is None:
            yield group, ABSENT * len(names)
            continue
        if len(text) != size * len(held):
            problems.append(
                f"line 0: {where}: the digest of {group} has {len(text)} characters, expected "
                f"{size * len(held)} for {len(held)} tensors"
            )
        elif held == names:
            yield group, text
            continue
        chunks = {name: text[i * size : (i + 1) * size] for i, name in enumerate(held)}
        yield group, "".join(chunks.get(name, ABSENT) for name in names)


def _taps(step: StepRecord, held: Sequence[str], whole: Sequence[str]) -> str:
    if tuple(held) == tuple(whole):
        return step.taps
    size = TAP_HEX_CHARS
    rows = {name: step.taps[i * size : (i + 1) * size] for i, name in enumerate(held)}
    return "".join(rows.get(name, "f" * size) for name in whole)
