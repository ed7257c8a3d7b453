"""Digests of what went through modules: inputs, outputs, gradients, call by call, on every rank.

    record -> rows of one rank, named by the start record -> which microbatch each is of
      -> both runs, all ranks -> program order -> the first row that differs

The first difference in program order is where a fault entered. Program order is the place in the
step, which every rank counts alike; in a pipeline: forward before backward, then microbatches, then
stages as data flows, then places. A module that is called more often than once a microbatch folds
all further calls into one row. Such a row says that something differs, not when, so it comes last;
unless what it returned differs and all that it was given does not, which is its own work. Gradients
of such a module come last, too: backward makes its calls in another order.

A module that a graph scope takes apart, as the router's does experts, is called in one run only:
that is counted, not failed. Any other that ran in one run only, or less often, differs. A pattern
of which all was taken apart, never ran or is no module looked at nothing, which is an error: the
last step decides, as the first ones are eager in every run.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdp_core.config import tap_pattern
from harness.checks.evidence import (
    Key,
    Options,
    Runs,
    check,
    count,
    diverged,
    error,
    passed,
    rank_table,
    shared_pairs,
    step_table,
)
from harness.records import (
    DIGEST_HEX_CHARS,
    NEVER_RAN,
    TAP_HEX_CHARS,
    CheckResult,
    Difference,
    RunResult,
    RunSpec,
    StartRecord,
    StepRecord,
)

NAME = "taps"
INPUT, OUTPUT, GRADIENT = "input", "output", "gradient"
UNCLIPPED = "unclipped"
MISSING = "never ran"


@dataclass(frozen=True)
class Tapped:
    """What went through a module: the `number`-th of a tap, as `layers.0.attn:output`.

    `stage` is of the pipeline. `place` is that of its first call in the step, "" if it never ran;
    `microbatch` is None of a row that stands for several calls.
    """

    tap: str
    number: int
    stage: int
    place: str
    microbatch: int | None

    @property
    def name(self) -> str:
        """`layers.0.attn:output[1]`."""
        return f"{self.tap}[{self.number}]"

    @property
    def module(self) -> str:
        """`layers.0.attn`."""
        return self.tap.partition(":")[0]

    @property
    def kind(self) -> str:
        return self.tap.partition(":")[2]

    @property
    def is_unclipped(self) -> bool:
        """Whether it is a parameter's gradient, `module`, before `clip_grad_norm_`."""
        return self.kind == UNCLIPPED


@dataclass(frozen=True)
class Call(Tapped):
    """One row of one rank."""

    digest: str


@dataclass(frozen=True)
class Row(Tapped):
    """One row of one rank as both runs have it: its digests, "" in a run that did not make it.

    Its place in the program is as the reference ran it, if it did.
    """

    rank: int
    reference: str
    candidate: str

    @property
    def differs(self) -> bool:
        """Whether the digests differ, or one of them ran and the other did not."""
        return self.reference != self.candidate

    @property
    def is_whole(self) -> bool:
        return bool(self.reference and self.candidate)


@check(
    NAME, "digests of what went through the modules of `taps`, call by call",
    compares=True, is_exact=True,
)  # fmt: skip
def _taps(runs: Runs, _: Options) -> CheckResult:
    return taps(runs.reference, runs.candidate)


def taps(reference: RunResult, candidate: RunResult) -> CheckResult:
    """Compare every call of the (step, rank) pairs that both runs hold."""
    starts, others = (
        {rank: records.start for rank, records in rank_table(run).items() if records.start}
        for run in (reference, candidate)
    )
    for rank, start in starts.items():
        if rank in others and others[rank].taps != start.taps:
            return error(NAME, "unsupported", f"the runs tap different modules on rank {rank}")
    patterns = _patterns(reference, candidate)
    if not any(start.taps for start in starts.values()) and not patterns:
        return error(NAME, "unsupported", "the run taps no module: say which with taps: [...]")
    ours, theirs = step_table(reference), step_table(candidate)
    pairs = [key for key in shared_pairs(ours, theirs) if key[1] in starts]
    specs = (reference.spec, candidate.spec)
    equal, taken_apart, note, last = 0, set[str](), "", max(pairs, default=(0, 0))[0]
    bad: dict[Key, list[Row]] = {}
    at_last: list[Row] = []
    for key in pairs:
        every = _rows_of(ours[key], theirs[key], starts[key[1]], specs)
        rows, unseen = _shared(every, specs)
        taken_apart |= unseen
        at_last += every if key[0] == last else []
        equal += sum(bool(row.reference) and not row.differs for row in rows)
        if any(row.differs for row in rows):
            bad[key] = rows
    if taken_apart:
        number = count(len(taken_apart), "tap")
        note = f"; {number} ran in one run only, {min(taken_apart)} first by name"
    if bad:
        return _failure(bad, note, len(pairs))
    blind = _blind(patterns, at_last, last)
    if blind is None and not equal:
        blind = f"no tapped module ran in both runs{note}"
    if blind is not None:
        return error(NAME, "not_run", blind)
    message = f"{count(equal, 'call')} equal in {len(pairs)} (step, rank) pairs{note}"
    return passed(NAME, message, calls=equal, unseen=len(taken_apart))


def _patterns(*runs: RunResult) -> list[str]:
    """What the runs tap, by specification or by the script's own line."""
    found = [text for run in runs for text in run.spec.config.get("taps", ())]
    for records in (records for run in runs for records in run.ranks):
        found += [text for detail in records.said(NAME) for text in detail["patterns"]]
    return list(dict.fromkeys(map(str, found)))


def _blind(patterns: Sequence[str], rows: Sequence[Row], step: int) -> str | None:
    """What to say of the first pattern that compares nothing in a step; None if all do."""
    ran: dict[str, set[str]] = {}
    for row in rows:
        sides = {"reference": row.reference, "candidate": row.candidate}
        ran.setdefault(row.tap, set()).update(side for side in sides if sides[side])
    for text in patterns:
        pattern = tap_pattern(text)
        meant = {
            tap: sides for tap, sides in ran.items()
            if tap.endswith(f":{pattern.kind}") and pattern.matches(tap.partition(":")[0])
        }  # fmt: skip
        if not meant:
            return f"the tap {text} compares nothing: it matches no module that either run called"
        if not any(len(sides) == 2 for sides in meant.values()):
            first = min(meant)
            where = (
                f"in the {' and '.join(meant[first])} alone" if meant[first] else "in neither run"
            )
            return f"the tap {text} compares nothing: at step {step} {first} ran {where}"
    return None


def _failure(bad: Mapping[Key, list[Row]], note: str, num_pairs: int) -> CheckResult:
    step = min(bad)[0]
    here = in_program_order([row for (at, _), rows in bad.items() if at == step for row in rows])
    different = [row for row in here if row.differs]
    first = different[0]
    what = f"the gradient of the output of {first.module}" if first.kind == GRADIENT else first.tap
    what = f"the gradient of {first.module} before clipping" if first.is_unclipped else what
    found = Difference(
        step=step, rank=first.rank, quantity=f"taps.{first.kind}", tensor=first.name,
        reference=first.reference or MISSING, candidate=first.candidate or MISSING,
    )  # fmt: skip
    places = [(row.rank, f"{row.name} of rank {row.rank}") for row in different]
    named, pairs = f"{what}, call {first.number}, in program order", (len(bad), num_pairs)
    return diverged(NAME, named, found, "call", places, pairs, note)


# --- rows of a step ---------------------------------------------------------------------------


def calls(record: StepRecord, start: StartRecord, spec: RunSpec) -> list[Call]:
    """The rows of a step of a run, in the order in which the start record names them.

    A call before the first one of its kind in the microbatch of its number is of an earlier one.
    """
    rows = list(_rows(record, start, spec.config.get("microbatches")))
    begins: dict[str, dict[int, str]] = {}
    for kind in (INPUT, OUTPUT, GRADIENT):
        ran = [row for row in rows if row.kind == kind and row.place]
        first = min(ran, key=lambda row: row.place).tap if ran else ""
        of_first = [row for row in ran if row.tap == first]
        begins[kind] = {r.microbatch: r.place for r in of_first if r.microbatch is not None}
    for index, row in enumerate(rows):
        places = begins.get(row.kind, {})
        if row.microbatch is not None and row.place and row.place < places.get(row.microbatch, ""):
            begun = [number for number, place in places.items() if place <= row.place]
            rows[index] = replace(row, microbatch=max(begun, default=row.microbatch))
    return rows


def _rows(record: StepRecord, start: StartRecord, microbatches: object) -> Iterator[Call]:
    most = microbatches if isinstance(microbatches, int) else len(start.taps)
    for index, (name, stage) in enumerate(zip(start.taps, start.tap_stages, strict=False)):
        row = record.taps[index * TAP_HEX_CHARS : (index + 1) * TAP_HEX_CHARS]
        tap, _, text = name.rstrip("]").rpartition("[")
        number = int(text) if text.isdigit() else 0
        place = row[DIGEST_HEX_CHARS:]
        call = Call(
            tap, number, stage, "" if place == NEVER_RAN else place,
            number if number < most else None, row[:DIGEST_HEX_CHARS],
        )  # fmt: skip
        yield replace(call, microbatch=None) if call.is_unclipped else call


def _rows_of(
    ours: StepRecord, theirs: StepRecord, start: StartRecord, specs: Sequence[RunSpec]
) -> list[Row]:
    sides = [calls(record, start, spec) for record, spec in zip((ours, theirs), specs, strict=True)]
    found = []
    for pair in zip(*sides, strict=True):
        at = pair[0] if pair[0].place else pair[1]
        digests = (call.digest if call.place else "" for call in pair)
        about = at.tap, at.number, at.stage, at.place, at.microbatch
        found.append(Row(*about, ours.rank, *digests))
    return found


def shared_rows(
    ours: StepRecord, theirs: StepRecord, start: StartRecord, specs: Sequence[RunSpec]
) -> tuple[list[Row], frozenset[str]]:
    """The rows of a step of one rank of both runs, but those of taps that a graph scope took apart,
    which ran in one run only; and these taps."""
    return _shared(_rows_of(ours, theirs, start, specs), specs)


def shared_steps(reference: RunResult, candidate: RunResult) -> Iterator[dict[Key, list[Row]]]:
    """Step by step, the `shared_rows` of the ranks that tap the same modules in both runs."""
    ours, theirs = step_table(reference), step_table(candidate)
    starts, others = (
        {rank: records.start for rank, records in rank_table(run).items()}
        for run in (reference, candidate)
    )
    specs, found = (reference.spec, candidate.spec), dict[int, dict[Key, list[Row]]]()
    for key in shared_pairs(ours, theirs):
        start, other = starts[key[1]], others[key[1]]
        if start is not None and other is not None and start.taps == other.taps:
            rows, _ = shared_rows(ours[key], theirs[key], start, specs)
            found.setdefault(key[0], {})[key] = rows
    yield from found.values()


def _shared(rows: Sequence[Row], specs: Sequence[RunSpec]) -> tuple[list[Row], frozenset[str]]:
    ran = {row.tap for row in rows if row.reference}
    also = {row.tap for row in rows if row.candidate}
    unseen = {tap for tap in ran - also if _is_unseen(tap, also, specs[1])}
    unseen |= {tap for tap in also - ran if _is_unseen(tap, ran, specs[0])}
    return [row for row in rows if row.tap not in unseen], frozenset(unseen)


def _is_unseen(tap: str, others: set[str], spec: RunSpec) -> bool:
    """Whether a tap says nothing of a run that has `others`: one that clips clips all gradients."""
    module, _, kind = tap.partition(":")
    clips = kind == UNCLIPPED and any(other.endswith(f":{kind}") for other in others)
    return _takes_apart(spec, module) and not clips


def _takes_apart(spec: RunSpec, module: str) -> bool:
    """Whether a run calls what is inside of a module, and not the module, as the router's graph
    does; of another program nothing is known, whose replays call no module."""
    if not spec.is_builtin:
        return True
    layer, _, part = module.removeprefix("layers.").partition(".")
    first, last = spec.config.get("graph_layers") or (0, math.inf)
    is_captured = layer.isdecimal() and first <= int(layer) <= last
    return part == "mlp.moe" and "moe_router" in spec.config.get("graph", ()) and is_captured


def in_program_order(rows: Sequence[Row]) -> list[Row]:
    """Rows of one step, of all ranks, as the program makes them."""
    is_staged = any(row.stage for row in rows)
    shared = {row.module for row in rows if row.microbatch != row.number and row.place}
    equal = {
        (row.rank, row.module, row.number) for row in rows if row.kind == INPUT and not row.differs
    }

    def order(row: Row) -> tuple[object, ...]:
        is_backward, is_folded = row.kind == GRADIENT, row.microbatch is None
        own = row.kind == OUTPUT and (row.rank, row.module, row.number) in equal
        # A row of several calls has the place of the first of them.
        is_last = is_folded and not (own and row.differs)
        is_last |= is_backward and row.module in shared
        number = row.number if row.microbatch is None else row.microbatch
        staged = (is_backward, number, -row.stage if is_backward else row.stage)
        # "~" is after every place.
        return (is_last, *(staged if is_staged else ()), row.place or "~", row.rank)

    return sorted(rows, key=order)
