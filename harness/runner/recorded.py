"""A run that was recorded by hand, as it lies in its folder: to be judged, or laid beside another.

    spec.json         the command; world size, device and steps as far as known when it was started
    rankN.jsonl       the records of each rank, written by the ranks themselves
    part-N.json       how one of several `harness wrap` of the same job ended
    outcome.json      what became of the whole run

That is the form of a run inside of a run folder, so any of those can be read here, too.
"""

import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from harness.checks.bits import quantities
from harness.checks.evidence import (
    different_leaves,
    groups_of,
    in_one_only,
    known_of,
    place_in_step,
    show_float,
    unit_of,
)
from harness.engine.evidence import last_place, place_path
from harness.engine.outcome import RankEvidence, classify, ending_of
from harness.errors import UsageError
from harness.records import (
    ABSENT,
    DIGEST_HEX_CHARS,
    NEVER_RAN,
    TAP_HEX_CHARS,
    Difference,
    ExitCode,
    FloatBits,
    InitialRecord,
    RankExit,
    RecordError,
    RunOutcome,
    RunResult,
    RunSpec,
    StepRecord,
    dumps,
    ulp_distance,
)
from harness.store import OUTCOME_FILE, SPEC_FILE, load_run_folder, sealed_outcome
from harness.store.files import read_object, told, write_atomic, write_object, write_once
from harness.store.streams import Part, job_ranks, rank_path, read_parts, read_rank, read_start
from harness.values import Json

UNKNOWN_SIZE = 0
"""World size in the specification of a run whose ranks have not said it yet."""


@dataclass(frozen=True, kw_only=True)
class Wrapped(Json):
    """What one `harness wrap` saw of a run: `code` is the command's, negative for a signal.

    `exits` are codes of ranks on its machine that it could see, by rank as text, `order` the ranks
    that failed, as it saw them end, `stopped_by` the signal that it passed on to stop it, or 0.
    """

    code: int
    exits: dict[str, int] = field(default_factory=dict)
    order: tuple[int, ...] = ()
    stopped_by: int = 0
    started_unix_s: float = 0.0
    wall_s: float = 0.0


def _read_spec(folder: Path) -> RunSpec:
    """The specification of a recorded run, completed by what its ranks say of themselves."""
    if not (folder / SPEC_FILE).is_file():
        raise UsageError(f"{folder}: expected the folder of one run, as RUN/runs/KEY; it has no "
                         f"{SPEC_FILE}")  # fmt: skip
    try:
        spec = RunSpec.from_json(read_object(folder / SPEC_FILE, sealed=False))
    except (OSError, RecordError) as error:
        raise UsageError(f"{folder / SPEC_FILE}: {told(error)}") from error
    return _completed(folder, replace(spec, recorded=spec.recorded or spec.key))


def _completed(folder: Path, spec: RunSpec) -> RunSpec:
    """`spec` with the world size and device that the first of its ranks has recorded, if any."""
    starts = [start for path in folder.glob("rank*.jsonl") if (start := read_start(path))]
    if spec.world_size != UNKNOWN_SIZE or not starts:
        return spec
    first = min(starts, key=lambda start: start.rank)
    spec = replace(spec, world_size=first.world_size)
    return replace(spec, device="cuda") if first.device == "cuda" else spec


def load(folder: Path) -> RunResult:
    """A recorded run as the checks see it, in whatever state its files are (`UsageError`: none)."""
    spec = _read_spec(folder)
    if spec.world_size == UNKNOWN_SIZE:
        raise UsageError(f"{folder}: expected a recorded run, no rank of it has recorded anything")
    return load_run_folder(folder, spec)


def with_steps(run: RunResult, steps: int) -> RunResult:
    """The run, with this number of steps if its specification says none."""
    return renamed(run, config={"steps": steps} | run.spec.config)


def renamed(run: RunResult, **changes: Any) -> RunResult:
    """The run with another specification, under the key that this gives."""
    spec = replace(run.spec, **changes)
    return replace(run, spec=spec, outcome=replace(run.outcome, key=spec.key))


def steps_on_rank_0(run: RunResult) -> int:
    """Steps that rank 0 recorded."""
    return next((len(records.steps) for records in run.ranks if records.rank == 0), 0)


def begin(folder: Path, spec: RunSpec, *, is_joint: bool) -> None:
    """Make the folder of a run and its specification; of a joint one, if it is not there yet.

    Raises `UsageError` if it holds something else, `Infrastructure` if it cannot be written.
    """
    refused = UsageError(f"--out {folder}: expected a new or empty folder, it holds other files")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}") from error
    if held and not is_joint:
        raise refused
    if not write_once(folder / SPEC_FILE, dumps(spec) + "\n"):
        same = is_joint and _read_spec(folder).recorded == spec.recorded
        if not same or (folder / OUTCOME_FILE).exists():
            raise refused


def finish(
    folder: Path, spec: RunSpec, part: Wrapped, *, index: int, parts: int
) -> RunResult | None:
    """Store what process `index` of `parts` saw; the last one says what became of the run.

    Returns the run, None if others have not ended yet or no rank has recorded anything.
    """
    write_object(folder / f"part-{index}.json", part)
    seen = [folder / f"part-{number}.json" for number in range(parts)]
    spec = _completed(folder, spec)
    if not all(path.exists() for path in seen) or spec.world_size == UNKNOWN_SIZE:
        return None
    outcome = _conclude(folder, spec, [Wrapped.from_json(read_object(path)) for path in seen])
    write_atomic(folder / SPEC_FILE, dumps(spec) + "\n")  # of all parts the same
    if not write_once(folder / OUTCOME_FILE, sealed_outcome(folder, outcome)):
        return None
    for rank in range(0 if outcome.what else spec.world_size):
        place_path(folder, rank).unlink(missing_ok=True)  # a run that ended well needs none
    return load(folder)


def _conclude(folder: Path, spec: RunSpec, parts: Sequence[Wrapped]) -> RunOutcome:
    """What became of a run, from its records and what was seen of its processes."""
    code = next((part.code for part in parts if part.code), 0)
    command_ended = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
    seen = {int(rank): known for part in parts for rank, known in part.exits.items()}
    order, ranks = [rank for part in parts for rank in part.order], []
    for rank in range(spec.world_size):
        records = read_rank(rank_path(folder, rank), rank)
        usual = 1 if records.error is not None else 0 if records.end is not None else code
        failed_at = float(order.index(rank)) if rank in order else None
        exit = RankExit(rank=rank, code=seen.get(rank, usual), failed_at=failed_at)
        ranks.append(RankEvidence(exit=exit, records=records, place=last_place(folder, rank)))
    answer = classify(ranks)
    what, message, culprit, _ = answer
    if culprit is not None and ranks[culprit].silent and culprit not in seen:
        # The code is that of the command: nobody saw the rank's own.
        message = f"rank {culprit} ended without an end record; the command {command_ended}"
    if not what and code:
        what = "crashed"
        message = f"the command {command_ended} although every rank ended well"
    if what and (stopped_by := next((p.stopped_by for p in parts if p.stopped_by), 0)):
        what, message = "interrupted", f"harness wrap was sent signal {stopped_by}: {message}"
    return RunOutcome(
        key=spec.recorded, what=what, message=message, culprit_rank=culprit,
        ranks=tuple(rank.exit for rank in ranks),
        started_unix_s=min(part.started_unix_s for part in parts),
        wall_s=max(part.wall_s for part in parts), ending=ending_of(answer, ranks),
    )  # fmt: skip


# --- two recordings, of other days, clusters or commits: where they differ first ------------------

# environment -> state before the first step -> rank by rank, each step, tensor and call of both
#   -> of each kind the first difference; what was compared, and what only one has, in numbers
#
# A recording is the folder of a job that recorded itself (`harness.recorder.record`), of `harness
# wrap`, or of one run in a run folder. Of a job that went on from a checkpoint the latest part that
# has a step is used, and is compared with those before it. Ranks of other world sizes hold other
# shards: of those, means over ranks are compared, and before the first step what all have alike.
Kind = Literal[
    "environment", "before", "state", "modules", "losses", "grad_norm", "skipped", "other"
]
KIND_OF: dict[str, Kind] = {"grad_norm": "grad_norm", "skipped": "skipped", "evaluation": "other"}
"""Of a value of a step; all others are losses."""
ONCE_A_HOST = ("packages", "program", "commit", "command")
_UNSEEDED = "0" * DIGEST_HEX_CHARS  # of a random generator that the program did not seed
_TAKEN = FloatBits.from_bits(0)
Held = Mapping[str, Mapping[str, tuple[str, str, str]]]
"""By group and name: shape, digest, and the place in the step, "" where it has none."""


@dataclass(frozen=True, kw_only=True)
class Finding(Json):
    """The first difference of a kind: where, how much of that step, how many steps and ranks.

    `within`: of parts of one recording, "" of A and B.
    """

    kind: Kind
    difference: Difference
    places: int  # tensors, calls or values that differ in that step, on all ranks
    ranks: tuple[int, ...]  # in that step
    records: int  # (step, rank) that differ in this
    within: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison(Json):
    """The answer. `a` and `b` say what each has; `compared` counts; `problems` are damage.

    `other_shapes`: tensors that both have, in other shapes or dtypes, so that digests say nothing.
    `largest_gap`: relative, of each kind of value that differs.
    """

    a: dict[str, Any]
    b: dict[str, Any]
    same_world_size: bool
    environment: tuple[Finding, ...]
    findings: tuple[Finding, ...]
    compared: dict[str, int]
    other_shapes: int
    largest_gap: dict[str, float]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> ExitCode:
        """A difference that was found is one, whatever else is damaged."""
        if self.findings:
            return ExitCode.FAILED
        if self.problems or self.other_shapes:
            return ExitCode.NO_VERDICT
        is_any = any(self.compared[noun] for noun in ("digest", "call", "value"))
        return ExitCode.PASSED if is_any else ExitCode.NOTHING_RAN


class Recording:
    """A folder of records, read rank by rank; `name` is A or B (`UsageError`: it is none)."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name, self.ranks = path, name, job_ranks(path)
        self.notes, self.problems = list[str](), list[str]()
        self.steps: dict[int, bool] = {}  # whether it has digests
        self.only: Counter[str] = Counter()
        self.num_parts = self.ended = 0
        self.read = lru_cache(maxsize=1)(lambda rank: read_parts(path, rank))
        if not self.ranks and (path / SPEC_FILE).is_file():
            run = load(path)
            held = (each for each in run.ranks if each.start or each.problems)
            whole = {each.rank: (Part(number=0, records=each),) for each in held}
            self.ranks = sorted(whole)
            self.read = lru_cache(maxsize=1)(lambda rank: whole[rank])
            self.notes += [f"{name} ended as {run.outcome.what}"] if run.outcome.what else []
        if not self.ranks:
            expected = "a folder of a job that recorded itself, of harness wrap, or RUN/runs/KEY"
            raise UsageError(f"{path}: expected {expected}, found no records in it")
        starts = [part.records.start for part in self.read(self.ranks[0])]
        self.world_size = next((s.world_size for s in reversed(starts) if s), len(self.ranks))

    def parts(self, rank: int) -> list[Part]:
        if rank not in self.ranks:
            return []
        used, read = [], self.read(rank)
        for part in read:
            records, where = part.records, f"{self.name}, rank {rank}, part {part.number}"
            self.problems += [f"{where}: {why}" for why in records.problems]
            if part.lost:
                self.notes.append(f"{where}: left out {part.lost} bytes of an unfinished last line")
            if (error := records.error) is not None:
                self.notes.append(f"{where}: stopped at step {error.step}: {error.message}")
            if (start := records.start) is not None and start.world_size == self.world_size:
                used.append(part)
            else:
                why = "no start record" if start is None else f"of {start.world_size} ranks"
                self.notes.append(f"{where}: not compared: {why}")
            for step in records.steps:
                self.steps[step.step] = self.steps.get(step.step, False) or _has(step)
        self.ended += any(part.records.end is not None for part in read[-1:])
        self.num_parts = max(self.num_parts, len(read))
        return used

    def about(self) -> dict[str, Any]:
        """What there is, once all ranks were read; `only`: what the other does not have."""
        return {
            "path": str(self.path), "world_size": self.world_size, "ranks": self.ranks,
            "parts": self.num_parts, "ended_ranks": self.ended, "steps": len(self.steps),
            "first_step": min(self.steps, default=None), "last_step": max(self.steps, default=None),
            "steps_with_digests": sum(self.steps.values()), "only": dict(+self.only),
        }  # fmt: skip


class _Pair:
    """Compares what two sides have, and counts: A and B, or parts of one recording."""

    def __init__(self) -> None:
        self.compared = Counter(rank=0, step=0, digest=0, call=0, value=0)
        self.steps: set[int] = set()
        self.only = set[tuple[str, int, str]](), set[tuple[str, int, str]]()
        self.other_shapes: set[tuple[int, str, str]] = set()
        self.gaps: dict[str, float] = {}
        self._first: dict[Kind, tuple[tuple[Any, ...], Difference]] = {}
        self._places: dict[Kind, list[int]] = {}  # ranks of what differs in the first step
        self._records: dict[Kind, set[tuple[int, int]]] = {}

    def rank(self, rank: int, ours: Iterable[Part], theirs: Iterable[Part]) -> None:
        before = _initial(ours), _initial(theirs)
        for first in sorted(before[0].keys() & before[1].keys()):
            self.tensors("before", first, rank, *(_held(*side[first]) for side in before))
        steps = used(ours), used(theirs)
        both = sorted(steps[0].keys() & steps[1].keys())
        self.compared["rank"] += bool(both)
        for step in both:
            sides = [side[step] for side in steps]
            values = ({"skipped": _TAKEN, **dict(quantities(record))} for record, _ in sides)
            self.values(step, rank, *values)
            has = [_has(record) for record, _ in sides]
            if all(has):
                self.tensors("state", step, rank, *(_held(*side) for side in sides))
                self.tensors("modules", step, rank, *(_tapped(*side) for side in sides))
            elif any(has):
                self.only[has[1]].add(("digested step", rank, str(step)))

    def values(
        self, step: int, rank: int, left: Mapping[str, FloatBits], right: Mapping[str, FloatBits]
    ) -> None:
        self.steps.add(step)
        for order, name in enumerate(dict.fromkeys((*left, *right))):
            if name not in left or name not in right:
                self.only[name not in left].add(("value", rank, name))
                continue
            a, b, kind = left[name], right[name], KIND_OF.get(name.removeprefix("mean "), "losses")
            self.compared["value"] += 1
            if a.bits != b.bits:
                gap = abs((a.value or 0) - (b.value or 0))
                gap /= max(abs(a.value or 0), abs(b.value or 0)) or 1
                self.gaps[kind] = max(self.gaps.get(kind, 0), gap)
                self._differ(kind, (step, order, rank), (name, ""), a, b)

    def tensors(self, kind: Kind, step: int, rank: int, left: Held, right: Held) -> None:
        noun, digest = ("call", "call") if kind == "modules" else ("tensor", "digest")
        for index, group in enumerate(groups_of(left, right)):
            ours, theirs = left.get(group, {}), right.get(group, {})
            if ours == theirs:
                self.compared[digest] += len(ours)
                continue
            odd = in_one_only(group, ours, theirs)
            for place, name in enumerate(dict.fromkeys((*ours, *theirs))):
                if unit_of(group, name) in odd:
                    self.only[name not in ours].add((noun, rank, f"{group}/{name}"))
                    continue
                (shape, a, at), (other, b, _) = ours[name], theirs[name]
                if shape != other and shape and other:
                    self.other_shapes.add((rank, group, name))
                    continue
                self.compared[digest] += 1
                if a != b:
                    order = (step, place_in_step(group, name), index, at, place, rank)
                    self._differ(kind, order, (group, name), a, b)

    def _differ(
        self, kind: Kind, order: tuple[Any, ...], named: tuple[str, str],
        *sides: str | FloatBits,
    ) -> None:  # fmt: skip
        """Take note of a difference; `order` begins with its step and ends with its rank."""
        step, rank, first = order[0], order[-1], self._first.get(kind)
        self._records.setdefault(kind, set()).add((step, rank))
        if first is None or step < first[0][0]:
            self._places[kind] = []
        if first is None or order < first[0]:
            numbers = [side for side in sides if isinstance(side, FloatBits)]
            texts = [show_float(s) if isinstance(s, FloatBits) else s for s in sides]
            first = self._first[kind] = order, Difference(
                step=step, rank=rank, quantity=named[0], tensor=named[1], reference=texts[0],
                candidate=texts[1], ulps=ulp_distance(*numbers) if numbers else None,
            )  # fmt: skip
        if step == first[0][0]:
            self._places[kind].append(rank)

    def findings(self, within: str = "") -> Iterator[Finding]:
        """The first of each kind, in the order of steps."""
        for kind, (_, found) in sorted(self._first.items(), key=lambda each: each[1][1].step):
            ranks = self._places[kind]
            yield Finding(
                kind=kind, difference=found, places=len(ranks), ranks=tuple(sorted(set(ranks))),
                records=len(self._records[kind]), within=within,
            )  # fmt: skip


# --- what records hold ------------------------------------------------------------------------


def used(parts: Iterable[Part]) -> dict[int, tuple[StepRecord, Part]]:
    """The steps of a rank, each of the latest part that has it."""
    return {step.step: (step, part) for part in parts for step in part.records.steps}


def _initial(parts: Iterable[Part]) -> dict[int, tuple[InitialRecord, Part]]:
    return {int(part.job.get("first_step", 0)): (part.records.initial, part)
            for part in parts if part.records.initial is not None}  # fmt: skip


@lru_cache(maxsize=64)  # most steps of a job share the texts of one that holds nothing
def _is_some(text: str) -> bool:
    return bool(text.strip(ABSENT[0]))


def _has(record: StepRecord) -> bool:
    return any(map(_is_some, (*record.digests.values(), record.taps)))


def _held(record: StepRecord | InitialRecord, part: Part) -> Held:
    """The tensors of a record, without those that a rank has in other steps only."""
    found: dict[str, dict[str, tuple[str, str, str]]] = {}
    tensors = part.records.start.tensors if part.records.start is not None else {}
    for group, text in record.digests.items():
        shapes = part.shapes.get(group, {})
        none = (ABSENT, _UNSEEDED) if group == "rng" else (ABSENT,)
        chunks = _chunks(text, DIGEST_HEX_CHARS)
        named = zip(tensors.get(group, ()), chunks, strict=False)
        found[group] = {n: (shapes.get(n, ""), digest, "") for n, digest in named
                        if digest not in none}  # fmt: skip
    return found


def _tapped(record: StepRecord, part: Part) -> Held:
    taps = part.records.start.taps if part.records.start is not None else ()
    rows = zip(taps, _chunks(record.taps, TAP_HEX_CHARS), strict=False)
    return {"taps": {name: ("", row[:DIGEST_HEX_CHARS], row[DIGEST_HEX_CHARS:])
                     for name, row in rows if row[DIGEST_HEX_CHARS:] != NEVER_RAN}}  # fmt: skip


def _chunks(text: str, size: int) -> Iterator[str]:
    return (text[i : i + size] for i in range(0, len(text), size))


def _known(part: Part) -> dict[str, Any]:
    """The environment of a rank, with the commit and the command of its program."""
    about = part.records.start.environment if part.records.start is not None else {}
    return {**known_of(part.records), **{n: about[n] for n in ONCE_A_HOST if about.get(n)}}


# --- the comparison ---------------------------------------------------------------------------


def compare(a: Path, b: Path) -> Comparison:
    """Compare two recordings (`UsageError`: one is none, or both are the same)."""
    if a.resolve() == b.resolve():
        raise UsageError(f"diff: expected another recording than {a}")
    sides, pair, repeats = (Recording(a, "A"), Recording(b, "B")), _Pair(), (_Pair(), _Pair())
    facts: dict[tuple[str, str, str, str], list[int]] = {}
    is_same = sides[0].world_size == sides[1].world_size
    other = [_Layout(side.world_size) for side in sides]
    for rank in sorted({*sides[0].ranks, *sides[1].ranks}):
        held = [side.parts(rank) for side in sides]
        for side, parts, repeat, layout in zip(sides, held, repeats, other, strict=True):
            for number in range(1, len(parts)):
                repeat.rank(rank, parts[:number], parts[number : number + 1])
                _environment(facts, rank, parts[number - 1], parts[number], f"{side.name}, parts")
            if not is_same:
                layout.add(parts)
        if all(held) and (is_same or not rank):
            _environment(facts, rank, held[0][-1], held[1][-1], "")
        if is_same:
            pair.rank(rank, *held)
    if not is_same:
        _compare_layouts(pair, other)
    for number, side in enumerate(sides):
        side.only.update(noun for noun, *_ in pair.only[number])
        side.only["step"] = len(side.steps.keys() - sides[1 - number].steps.keys())
        side.only["rank"] = len(set(side.ranks) - set(sides[1 - number].ranks))
    pair.compared["step"] = len(pair.steps)
    within = [each for side, repeat in zip(sides, repeats, strict=True)
              for each in repeat.findings(f"{side.name}, parts")]  # fmt: skip
    return Comparison(
        a=sides[0].about(), b=sides[1].about(), same_world_size=is_same,
        environment=tuple(
            Finding(kind="environment", places=1, ranks=tuple(ranks), records=0, within=between,
                    difference=Difference(step=0, rank=ranks[0], quantity=name, reference=left,
                                          candidate=right))
            for (between, name, left, right), ranks in facts.items()
        ),
        findings=(*pair.findings(), *within), compared=dict(pair.compared),
        other_shapes=len(pair.other_shapes), largest_gap=pair.gaps,
        problems=(*sides[0].problems, *sides[1].problems), notes=tuple(_notes(sides, repeats)),
    )  # fmt: skip


def _environment(
    facts: dict[tuple[str, str, str, str], list[int]], rank: int, a: Part, b: Part, within: str
) -> None:
    """Take note of facts in which the environments of a rank differ."""
    known = [_known(a), _known(b)]
    for name in ONCE_A_HOST:  # the first rank of a machine says it: others may lie otherwise
        if not all(each.get(name) for each in known):
            known = [{key: each[key] for key in each if key != name} for each in known]
    for name, left, right in different_leaves(*known):
        facts.setdefault((within, name, left, right), []).append(rank)


class _Layout:
    """Of a recording whose shards say nothing: sums over ranks, and what all ranks hold alike."""

    def __init__(self, world_size: int) -> None:
        self.size = world_size
        self._sums: dict[tuple[int, str], tuple[int, float]] = {}
        self._alike: dict[tuple[int, str, str], list[tuple[str, str, str]]] = {}

    def add(self, parts: Sequence[Part]) -> None:
        for step, (each, _) in used(parts).items():
            for name, value in (("loss", each.loss), ("grad_norm", each.grad_norm)):
                if value is not None:
                    count, total = self._sums.get((step, name), (0, 0.0))
                    more = math.nan if value.value is None else value.value
                    self._sums[step, name] = count + 1, total + more
        for first, (record, part) in _initial(parts).items():
            for group, held in _held(record, part).items():
                for name, digest in held.items():
                    self._alike.setdefault((first, group, name), []).append(digest)

    def means(self) -> dict[int, dict[str, FloatBits]]:
        found: dict[int, dict[str, FloatBits]] = {}
        for (step, name), (count, total) in self._sums.items():
            if count == self.size:
                mean = struct.pack(">d", total / count).hex()
                found.setdefault(step, {})[f"mean {name}"] = FloatBits.from_hex(mean)
        return found

    def alike(self) -> dict[int, dict[str, dict[str, tuple[str, str, str]]]]:
        """Tensors before a first step that every rank has, in one shape, with the same digest."""
        found: dict[int, dict[str, dict[str, tuple[str, str, str]]]] = {}
        for (first, group, name), held in self._alike.items():
            if len(held) == self.size and len(set(held)) == 1 and held[0][0]:
                found.setdefault(first, {}).setdefault(group, {})[name] = held[0]
        return found


def _compare_layouts(pair: _Pair, layouts: Sequence[_Layout]) -> None:
    means, alike = [each.means() for each in layouts], [each.alike() for each in layouts]
    for step in sorted(means[0].keys() & means[1].keys()):
        pair.values(step, 0, means[0][step], means[1][step])
    for first in sorted(alike[0].keys() & alike[1].keys()):
        pair.tensors("before", first, 0, alike[0][first], alike[1][first])
    pair.other_shapes.clear()  # shards of other world sizes have others by right


def _notes(sides: Sequence[Recording], repeats: Sequence[_Pair]) -> Iterator[str]:
    for side, repeat in zip(sides, repeats, strict=True):
        yield from side.notes
        if (known := len(side.ranks)) < side.world_size:
            yield f"{side.name}: {known} of {side.world_size} ranks have records"
        if steps := repeat.steps:
            ends = f"{min(steps)} to {max(steps)}"
            yield (f"{side.name}: {len(steps)} of the steps {ends} are in several parts: the last "
                   "is used, and was compared with the others")  # fmt: skip
    sizes = [side.world_size for side in sides]
    if sizes[0] != sizes[1]:
        yield (f"world sizes {sizes[0]} and {sizes[1]}: shards are not compared by digest. Losses "
               "and norms are means over ranks, whose bits may differ by rounding; before the "
               "first step, tensors that all ranks hold alike, in the same shape")  # fmt: skip
