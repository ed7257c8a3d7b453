"""Reading rank files: whatever is in them becomes records or problems, never an exception.

A problem is worded 'line N: why' and says 'after end' of a line that follows the end record. A
record that decodes is kept even if it is out of place, so that the checks can see it; one that
belongs to another rank is a problem only.

The rank of a foreign program says from which step on a group has which tensors (`NamesRecord`).
Here every step gets the tensors of all steps, with the digest `ABSENT` for what it did not hold: so
what one run has and another has not differs like any other tensor, at its step, by its name.

A job without a harness has a folder a rank, in it one of each process that recorded (`read_parts`;
`harness.recorder` writes it). It can be read while the job runs.
"""

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from harness.errors import one_line
from harness.recorder import JOB, SEGMENTS, START_FILE, checksum_in, unsealed
from harness.records import (
    ABSENT,
    AFTER,
    DIGEST_GROUPS,
    DIGEST_HEX_CHARS,
    NEVER_RAN,
    SCHEMA_VERSION,
    FinalRecord,
    InitialRecord,
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
from harness.values import strict_loads

MAX_LINE_BYTES = 64 << 20
END_BYTES, STEP_BYTES = 4096, 4 << 20
"""More than an end record has, and a step record of a model with 10,000 tensors."""
MAX_PROBLEMS = 100
"""Problems listed of one file; the rest is counted."""
_NEVER = ABSENT + NEVER_RAN  # the row of a call that was not made
AFTER_END = " after end"

Names = tuple[Mapping[str, Sequence[str]], Sequence[str]]
"""Of tensors by group, and of rows of taps."""


def rank_path(folder: Path, rank: int) -> Path:
    """Where a rank's records lie."""
    return folder / f"rank{rank}.jsonl"


def has_begun(path: Path, *, is_builtin: bool) -> bool:
    """Whether a rank's file says anything of a step, or of a program's state in its first one."""
    # The built-in trainer records its state before it compiles and captures anything.
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
    """Records of ranks 0 to `world_size` - 1; files of others are a problem of the last rank."""
    ranks = [read_rank(rank_path(folder, rank), rank) for rank in range(world_size)]
    expected = {rank_path(folder, rank) for rank in range(world_size)}
    extra = sorted(path.name for path in set(folder.glob("rank*.jsonl")) - expected)
    if extra and ranks:
        problem = f"line 0: files beyond world size {world_size}: {', '.join(extra[:8])}"
        ranks[-1] = replace(ranks[-1], problems=(*ranks[-1].problems, problem))
    return tuple(ranks)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one process of a rank recorded; of a run of the harness there is one a rank.

    `shapes` by group and tensor, as far as known; `job` is what its script asked the recorder for.
    `lost`: bytes at its end that are no whole line, as where it was killed while it wrote.
    """

    number: int
    records: RankRecords
    shapes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    lost: int = 0


def job_ranks(folder: Path) -> list[int]:
    """Ranks of a job that recorded itself in a folder; none if nothing of the kind is there."""
    names = {path.parents[1].name.removeprefix("rank") for path in
             folder.glob(f"rank*/part*/{START_FILE}")}  # fmt: skip
    return sorted(int(name) for name in names if name.isdecimal())


def read_parts(folder: Path, rank: int) -> tuple[Part, ...]:
    """What the processes of a job's rank recorded, in their order."""
    paths = (folder / f"rank{rank}").glob(f"part*/{START_FILE}")
    numbers = sorted(int(name) for path in paths if (name := path.parent.name[4:]).isdecimal())
    return tuple(_read_part(folder / f"rank{rank}" / f"part{n}", n, rank) for n in numbers)


def _read_part(folder: Path, number: int, rank: int) -> Part:
    held, problems, lost = _Held(rank), list[str](), 0
    with contextlib.ExitStack() as files:
        opened = _opened(folder, files)
        for name, file in opened:
            is_last = name == opened[-1][0]
            found, lost = _take_sealed(held, file, is_last=is_last)
            problems += [f"part{number}/{name}, {why}" for why in found]
    numbers = [int(Path(name).stem) for name, _ in opened[1:]]
    gaps = [(a, b, "segment") for a, b in pairwise(numbers)]
    gaps += [(a.step, b.step, "step") for a, b in pairwise(held.lists["step"])]
    problems += [f"part{number}: {noun}s {a + 1} to {b - 1} are missing"
                 for a, b, noun in gaps if b > a + 1]  # fmt: skip
    shapes: dict[str, dict[str, str]] = {}
    for each in held.lists["names"]:
        for group, names in each.tensors.items():
            shapes.setdefault(group, {}).update(
                zip(names, each.shapes.get(group, ()), strict=False)
            )
    said = [event.detail for event in held.lists["event"] if event.name == JOB]
    records = held.records(problems)
    return Part(
        number=number, records=records, shapes=shapes, job=said[0] if said else {}, lost=lost
    )


def _opened(folder: Path, files: contextlib.ExitStack) -> list[tuple[str, BinaryIO]]:
    """The start and the segments of a part, by name; of a job that runs the oldest may just go."""
    while True:
        found = []
        try:
            for path in (folder / START_FILE, *sorted(folder.glob(SEGMENTS))):
                found.append((path.name, files.enter_context(open_plain(path))))
        except FileNotFoundError:
            if (folder / START_FILE).exists():
                continue
        return found


def _take_sealed(held: "_Held", file: BinaryIO, *, is_last: bool) -> tuple[list[str], int]:
    """Take the lines of a file of a ring: what is wrong with them, and bytes that are no line."""
    problems, before, named = list[str](), 0, 0
    for number, line in enumerate(file, 1):
        if is_last and not line.endswith(b"\n"):
            return problems, len(line)
        if (read := unsealed(line, before)) is None:
            problems.append(f"line {number}: damaged: its checksum does not fit")
            before = checksum_in(line)
            continue
        text, before, of_names = read
        problems += [f"line {number}: {why}" for why in held.take(1 + held.is_begun, text + b"\n")]
        if isinstance(held.last, NamesRecord):
            named = of_names
        elif of_names != named and held.forget_digests():
            problems.append(f"line {number}: the names of its tensors are lost, and so its digests")
    return problems, 0


def read_rank(path: Path, rank: int) -> RankRecords:
    """Everything that one rank's file says."""
    held, problems = _Held(rank), list[str]()
    try:
        with open_plain(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), 1):
                if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                    problems.append(f"line {number}: longer than {MAX_LINE_BYTES} bytes")
                    break
                problems += [f"line {number}: {why}" for why in held.take(number, line)]
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"line 0: cannot be read: {error.strerror or error}")
    return held.records(problems)


class _Held:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lists: dict[str, list[Any]] = {"step": [], "event": [], "names": []}
        self.once: dict[str, Any] = dict.fromkeys(("start", "initial", "final", "error", "end"))
        self.last: Record | None = None

    @property
    def is_begun(self) -> bool:
        return self.last is not None

    def records(self, problems: list[str]) -> RankRecords:
        """All that was taken, with the same names for all steps."""
        after_end = [each for each in problems if each.endswith(AFTER_END)][:1]
        if (more := len(problems) - MAX_PROBLEMS) > 0:
            problems = [*problems[:MAX_PROBLEMS], f"line 0: {more} more problems"]
        once, names = dict(self.once), self.lists["names"]
        final = once.pop("final")
        records = RankRecords(
            rank=self.rank, problems=tuple(problems), after_end=tuple(after_end),
            steps=tuple(self.lists["step"]), events=tuple(self.lists["event"]), **once,
        )  # fmt: skip
        records = with_all_names(records, names) if names else records
        return records if final is None else _with_final(records, final)

    def forget_digests(self) -> bool:
        """Leave the last record without digests; whether it had some."""
        if isinstance(self.last, InitialRecord):
            self.once["initial"] = None
            return True
        if not isinstance(self.last, StepRecord) or not (self.last.digests or self.last.taps):
            return False
        self.lists["step"][-1] = replace(self.last, digests={}, taps="", nonfinite={})
        return True

    def take(self, number: int, line: bytes) -> Iterator[str]:
        """Decode one line and keep its record; what is wrong with it."""
        is_after_end = self.once["end"] is not None
        try:
            record = parse_record(line)
        except RecordError as error:
            cut = "" if line.endswith(b"\n") else f"cut short after {len(line)} bytes: "
            why = one_line(str(error))
            why = why if len(why) <= 200 else f"{why[:200]}..."
            yield f"{cut}{why}{AFTER_END if is_after_end else ''}"
            return
        self.last = record
        steps, kind = self.lists["step"], record.kind
        if record.rank != self.rank:
            yield f"{kind} record of rank {record.rank} in the file of rank {self.rank}"
        if isinstance(record, StartRecord) and number != 1:
            yield "start record is not the first line"
        if isinstance(record, StartRecord) and record.schema != SCHEMA_VERSION:
            yield f"schema {record.schema}, expected {SCHEMA_VERSION}"
        if isinstance(record, StepRecord) and self.once["start"] is None:
            yield f"step {record.step} before a start record"
        if isinstance(record, StepRecord) and steps and record.step <= steps[-1].step:
            yield f"step {record.step} follows step {steps[-1].step}"
        if is_after_end:
            yield f"{kind} record{AFTER_END}"
        elif self.once["error"] is not None and kind != "event":
            yield f"{kind} record after an error record"
        if record.rank != self.rank and kind != "start":
            return
        if kind in self.lists:
            self.lists[kind].append(record)
        elif self.once[kind] is None:
            self.once[kind] = record
        else:
            yield f"a second {kind} record"


# --- names that change from step to step ------------------------------------------------------


def with_all_names(records: RankRecords, names: Iterable[NamesRecord]) -> RankRecords:
    """The records with one list of names for all steps, in the start record."""
    if records.start is None:
        return records
    ordered = sorted(names, key=lambda record: record.step)
    held: list[Names] = [({}, ())]
    for record in ordered:
        held.append(({**held[-1][0], **record.tensors}, record.taps))
    steps = [record.step for record in ordered]
    own: list[Names] = [(record.tensors, record.taps) for record in ordered]
    whole = _union([(dict.fromkeys(DIGEST_GROUPS, ()), ()), *own])
    return _spread(records, lambda step: held[bisect_right(steps, step)], whole)


def _with_final(records: RankRecords, final: FinalRecord) -> RankRecords:
    """The records with what `final` says as groups of the last step."""
    start, steps = records.start, records.steps
    if not steps or steps[-1].step < final.step:
        return records  # the last step is missing, which is what is told
    if start is None or steps[-1].step > final.step:
        problem = f"line 0: state after step {final.step}, which is not the last one"
        return replace(records, problems=(*records.problems, problem))
    named = {f"{group}{AFTER}": names for group, names in final.tensors.items()}
    none = {group: _all_absent(ABSENT, len(names)) for group, names in named.items()}
    held = {f"{group}{AFTER}": text for group, text in final.digests.items()}
    bad = {f"{group}{AFTER}": names for group, names in final.nonfinite.items()}
    last = replace(
        steps[-1], digests={**steps[-1].digests, **none, **held},
        nonfinite={**steps[-1].nonfinite, **bad},
    )  # fmt: skip
    before = (replace(step, digests={**step.digests, **none}) for step in steps[:-1])
    if (initial := records.initial) is not None:
        initial = replace(initial, digests={**initial.digests, **none})
    start = replace(start, tensors={**start.tensors, **named})
    return replace(records, start=start, steps=(*before, last), initial=initial)


def aligned(*runs: RunResult) -> tuple[RunResult, ...]:
    """Runs of a program with the same names on each rank, in the order of the first run."""
    if all(run.spec.is_builtin for run in runs):
        return runs
    held: dict[int, list[Names]] = {}
    for records in (records for run in runs for records in run.ranks):
        if (start := records.start) is not None:
            held.setdefault(records.rank, []).append((start.tensors, start.taps))
    wholes = {rank: _union(names) for rank, names in held.items()}

    def laid(records: RankRecords) -> RankRecords:
        if (start := records.start) is None:
            return records
        own, whole = (start.tensors, start.taps), wholes[records.rank]
        same = own == whole
        return records if same else replace(
            _spread(records, lambda step: own, whole), problems=records.problems
        )  # fmt: skip

    return tuple(replace(run, ranks=tuple(map(laid, run.ranks))) for run in runs)


def with_shared_taps(*runs: RunResult) -> tuple[RunResult, ...]:
    """The runs with only those taps that all of them have, by rank, ordered as in the first."""
    held = [
        {each.rank: dict.fromkeys(each.start.taps) for each in run.ranks if each.start}
        for run in runs
    ]

    def laid(records: RankRecords) -> RankRecords:
        start, taps = records.start, [of_run.get(records.rank, {}) for of_run in held]
        shared = tuple(tap for tap in taps[0] if all(tap in own for own in taps))
        if start is None or start.taps == shared:
            return records
        at = dict(zip(start.taps, start.tap_stages, strict=False))
        own = replace(start, taps=shared, tap_stages=tuple(at.get(tap, 0) for tap in shared))
        rows = (_laid(step.taps, start.taps, shared, _NEVER) for step in records.steps)
        steps = (replace(step, taps=row) for step, row in zip(records.steps, rows, strict=True))
        return replace(records, start=own, steps=tuple(steps))

    return tuple(replace(run, ranks=tuple(map(laid, run.ranks))) for run in runs)


def _union(names: Iterable[Names]) -> Names:
    """All names, each once, in the order in which they first appear."""
    tensors: dict[str, dict[str, None]] = {}
    taps: dict[str, None] = {}
    for groups, rows in names:
        for group, held in groups.items():
            tensors.setdefault(group, {}).update(dict.fromkeys(held))
        taps.update(dict.fromkeys(rows))
    return {group: tuple(held) for group, held in tensors.items()}, tuple(taps)


def _spread(records: RankRecords, names_at: Callable[[int], Names], whole: Names) -> RankRecords:
    """The records laid over the names `whole`; their own ones are `names_at` each step."""
    if records.start is None:
        return records
    problems: list[str] = []

    def digests(held: Mapping[str, str], step: int) -> dict[str, str]:
        laid = {}
        for group, names in whole[0].items():
            text, own = held.get(group, ""), names_at(step)[0].get(group, ())
            if group in held and len(text) != DIGEST_HEX_CHARS * len(own):
                where = "the initial state" if step < 0 else f"step {step}"
                problems.append(
                    f"line 0: {where}: the digest of {group} has {len(text)} characters, expected "
                    f"{DIGEST_HEX_CHARS * len(own)} for {len(own)} tensors"
                )
            laid[group] = _laid(text, own, names, ABSENT)
        return laid

    if (initial := records.initial) is not None:
        initial = replace(initial, digests=digests(initial.digests, -1))
    steps = tuple(
        replace(step, digests=digests(step.digests, step.step),
                taps=_laid(step.taps, names_at(step.step)[1], whole[1], _NEVER))
        for step in records.steps
    )  # fmt: skip
    named, taps = {group: tuple(names) for group, names in whole[0].items()}, tuple(whole[1])
    start = replace(records.start, tensors=named, taps=taps, tap_stages=(0,) * len(taps))
    return replace(records, start=start, steps=steps, initial=initial,
                   problems=(*records.problems, *problems[:8]))  # fmt: skip


def _laid(text: str, own: Sequence[str], whole: Sequence[str], absent: str) -> str:
    """Chunks of `text`, one for each name in `own`, in the order of `whole`."""
    size = len(absent)
    if not text and whole:
        return _all_absent(absent, len(whole))
    if tuple(own) == tuple(whole) and len(text) == size * len(own):
        return text
    chunks = {name: text[i * size : (i + 1) * size] for i, name in enumerate(own)}
    return "".join(chunks.get(name) or absent for name in whole)


@lru_cache
def _all_absent(absent: str, number: int) -> str:
    """One text for all steps that hold nothing, of which a job of days has many."""
    return absent * number
